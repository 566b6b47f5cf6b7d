// The threads that carry out a kernel, and the scratch memory it works in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

using Index = std::int64_t;

// Bytes that somebody will read.
struct Stretch {
  const unsigned char* bytes;
  std::size_t size;
};

// A few threads that share the pieces of one region at a time.
//
// run() hands out pieces 0 … pieces-1 in order, one by one, to whoever asks first; the calling
// thread takes part. It returns when every piece is done and never waits for a thread that has
// not taken one, so a thread the system does not run costs nothing; a worker that has and gets no
// core, since another process is on it, is moved to that of the waiting caller. A worker looks for
// the next region for about SPIN_NS, then sleeps; meanwhile it fetches what is announced to be read
// next.
//
// Workers start with the first region that has more than one piece. In a child made by fork() there
// are none: the caller then does all pieces itself. One region at a time; callers take turns.
class Pool {
 public:
  using Piece = void (*)(void* state, Index piece, int thread);

  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;

  // Calls piece(state, i, thread) once for each i; thread is 0 for the caller, else 1 … threads-1.
  void run(Index pieces, Piece piece, void* state);

  // What the regions after the next will read first, at most STRETCHES of them. They may be gone
  // by then: nothing but the caches learns of it.
  static constexpr int STRETCHES = 4;
  void announce(const Stretch* stretches, int count);

  // At least `bytes` bytes, 64-byte aligned, kept until the next call with the same arguments:
  // common to all threads, or for one thread alone. Content is not kept when it grows.
  void* shared(std::size_t bytes);
  void* local(int thread, std::size_t bytes);

 private:
  struct State;
  State* state_;
};

}  // namespace octavo
