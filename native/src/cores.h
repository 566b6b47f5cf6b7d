// Which of this process's threads have a core of the machine, and how one without gets one.
#pragma once

#include <cstdint>
#include <memory>

namespace octavo {

using ThreadId = int;  // the system's number of it, never 0

ThreadId this_thread();

// Processor time that a thread has had, also of the moment; -1 if there is no such thread. One that
// waits for a core stands still.
std::int64_t processor_ns(ThreadId thread);

// While it lives a thread may run on the caller's core alone; for that the caller yields.
// Afterwards it runs elsewhere if it can, and may be moved wherever it could before. Does nothing
// where the system refuses. One at a time: two for one thread would restore what the other had
// changed.
class CoreLoan {
 public:
  explicit CoreLoan(ThreadId thread);
  ~CoreLoan();
  CoreLoan(const CoreLoan&) = delete;
  CoreLoan& operator=(const CoreLoan&) = delete;

 private:
  struct Cores;
  ThreadId thread_;
  std::unique_ptr<Cores> before_;  // null if nothing was changed
};

}  // namespace octavo
