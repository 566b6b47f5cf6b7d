#include "octavo/pool.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "cores.h"

namespace octavo {

namespace {

// Longer than the gap between two regions of one forward pass, shorter than a scheduler's slice:
// a worker that fell asleep is back 50 µs late.
constexpr auto SPIN_NS = std::chrono::nanoseconds(200'000);

// Longer than most pieces and than a moment in which the machine below is busy elsewhere. A caller
// who waits so long for a piece looks whether its thread has a core.
constexpr auto PATIENCE = std::chrono::nanoseconds(120'000);
constexpr int LOOKS = 32;   // between two looks at the clock
constexpr int YIELDS = 50;  // of a core that was lent, at most

constexpr std::size_t LINE = 64;
constexpr std::size_t FETCHED = 8 * LINE;  // between two looks for a region

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  void* reserve(std::size_t bytes) {
    if (bytes > bytes_) {
      const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
      std::free(memory_);
      bytes_ = 0;
      memory_ = std::aligned_alloc(64, rounded);
      if (memory_ == nullptr) throw std::bad_alloc();
      bytes_ = rounded;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// What comes next, fetched by whoever has nothing else to do. It may be changed while it is read:
// then lines are fetched that nobody needs.
class Ahead {
 public:
  void announce(const Stretch* stretches, int count) {
    for (int i = 0; i < Pool::STRETCHES; ++i) {
      const Stretch one = i < count ? stretches[i] : Stretch{nullptr, 0};
      stretches_[i].bytes.store(one.bytes, std::memory_order_relaxed);
      const std::size_t looks = (one.size + FETCHED - 1) / FETCHED;
      stretches_[i].size.store(looks * FETCHED, std::memory_order_relaxed);
    }
    fetched_.store(0, std::memory_order_relaxed);
  }

  // False if everything was fetched.
  bool fetch() {
    std::size_t at = fetched_.fetch_add(FETCHED, std::memory_order_relaxed);
    for (const Part& part : stretches_) {
      const std::size_t size = part.size.load(std::memory_order_relaxed);
      if (at < size) {
        const unsigned char* const bytes = part.bytes.load(std::memory_order_relaxed);
        for (std::size_t line = 0; line < FETCHED; line += LINE) {
          __builtin_prefetch(bytes + at + line, 0, 2);
        }
        return true;
      }
      at -= size;
    }
    return false;
  }

 private:
  struct Part {
    std::atomic<const unsigned char*> bytes{nullptr};
    std::atomic<std::size_t> size{0};
  };
  Part stretches_[Pool::STRETCHES];
  alignas(64) std::atomic<std::size_t> fetched_{0};
};

}  // namespace

// `ticket` is region number << 32 | pieces not yet handed out. A piece is claimed by counting down
// with compare-and-swap. A claim that succeeds holds the region open, so that what it reads of the
// region afterwards belongs to it: a late worker can neither take a piece of a region it has not
// seen nor read half of the next one.
struct Pool::State {
  alignas(64) std::atomic<std::uint64_t> ticket{0};
  alignas(64) std::atomic<Index> done{0};
  alignas(64) std::atomic<Index> wanted{0};
  Piece piece = nullptr;
  void* argument = nullptr;
  Index pieces = 0;
  alignas(64) std::atomic<std::uint32_t> region{0};
  std::atomic<bool> ending{false};

  int threads = 1;
  pid_t owner = 0;
  Ahead ahead;
  std::vector<std::thread> workers;
  std::vector<std::atomic<ThreadId>> holders;  // workers in a piece, by thread; else 0
  Scratch shared;
  std::vector<Scratch> local;

  static bool has_pieces(std::uint64_t value) { return (value & 0xffffffffu) != 0; }

  bool claim(Index* taken) {
    std::uint64_t seen = ticket.load(std::memory_order_acquire);
    while (has_pieces(seen)) {
      if (ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire)) {
        *taken = pieces - static_cast<Index>(seen & 0xffffffffu);
        return true;
      }
    }
    return false;
  }

  void take_pieces(int thread, ThreadId id) {
    std::atomic<ThreadId>& holder = holders[static_cast<std::size_t>(thread)];
    holder.store(id, std::memory_order_relaxed);
    Index taken = 0;
    while (claim(&taken)) {
      piece(argument, taken, thread);
      done.fetch_add(1, std::memory_order_release);
    }
    holder.store(0, std::memory_order_relaxed);
  }

  bool finished() const {
    return done.load(std::memory_order_acquire) >= wanted.load(std::memory_order_relaxed);
  }

  // Another process may have the core of a worker in the middle of a piece, for milliseconds, while
  // the caller waits for that piece. The worker gets the caller's core. Workers never lend: the
  // caller may leave at any time, and what it starts then would inherit where it may run.
  void lend_core() {
    for (std::size_t thread = 1; thread < holders.size() && !finished(); ++thread) {
      const std::atomic<ThreadId>& holder = holders[thread];
      const ThreadId id = holder.load(std::memory_order_relaxed);
      if (id == 0 || !stands_still(id)) continue;
      const CoreLoan loan(id);
      for (int i = 0; i < YIELDS && holder.load(std::memory_order_relaxed) == id; ++i) {
        sched_yield();
      }
    }
    sched_yield();
  }

  bool stands_still(ThreadId id) const {
    const std::int64_t before = processor_ns(id);
    for (int look = 0; look < 8 * LOOKS; ++look) {
      if (finished()) return false;
      pause();
    }
    return before >= 0 && processor_ns(id) == before;
  }

  void wait() {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      for (int look = 0; look < LOOKS; ++look) {
        if (finished()) return;
        pause();
      }
      if (std::chrono::steady_clock::now() - start > PATIENCE) lend_core();
    }
  }

  bool look_for_region() {
    const auto start = std::chrono::steady_clock::now();
    bool left = true;
    do {
      for (int look = 0; look < LOOKS; ++look) {
        if (has_pieces(ticket.load(std::memory_order_acquire))) return true;
        if (left) {
          left = ahead.fetch();
        } else {
          pause();
        }
      }
    } while (std::chrono::steady_clock::now() - start < SPIN_NS);
    return false;
  }

  void work(int thread) {
    const ThreadId id = this_thread();
    while (!ending.load()) {
      const std::uint32_t seen = region.load();
      if (look_for_region()) {
        take_pieces(thread, id);
      } else {
        region.wait(seen);
      }
    }
  }

  void start_workers() {
    owner = getpid();
    for (int thread = 1; thread < threads; ++thread) {
      workers.emplace_back([this, thread] { work(thread); });
    }
  }
};

Pool::Pool(int threads) : state_(new State) {
  state_->threads = threads;
  state_->local = std::vector<Scratch>(static_cast<std::size_t>(threads));
  state_->holders = std::vector<std::atomic<ThreadId>>(static_cast<std::size_t>(threads));
}

Pool::~Pool() {
  state_->ending.store(true);
  state_->region.fetch_add(1);
  state_->region.notify_all();
  const bool forked = state_->owner != getpid();
  for (std::thread& worker : state_->workers) {
    if (forked) {
      worker.detach();
    } else {
      worker.join();
    }
  }
  delete state_;
}

int Pool::threads() const { return state_->threads; }

void Pool::announce(const Stretch* stretches, int count) {
  state_->ahead.announce(stretches, count);
}

void* Pool::shared(std::size_t bytes) { return state_->shared.reserve(bytes); }

void* Pool::local(int thread, std::size_t bytes) {
  return state_->local[static_cast<std::size_t>(thread)].reserve(bytes);
}

void Pool::run(Index pieces, Piece piece, void* argument) {
  State& state = *state_;
  if (pieces <= 1 || state.threads == 1) {
    for (Index i = 0; i < pieces; ++i) piece(argument, i, 0);
    return;
  }
  if (state.workers.empty()) state.start_workers();
  state.piece = piece;
  state.argument = argument;
  state.pieces = pieces;
  state.wanted.store(pieces, std::memory_order_relaxed);
  state.done.store(0, std::memory_order_relaxed);
  const std::uint64_t region = (state.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  state.ticket.store(region << 32 | static_cast<std::uint64_t>(pieces), std::memory_order_seq_cst);
  state.region.fetch_add(1);
  state.region.notify_all();
  state.take_pieces(0, 0);
  state.wait();
}

}  // namespace octavo
