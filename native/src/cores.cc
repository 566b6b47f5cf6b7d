#include "cores.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#include <utility>

namespace octavo {

ThreadId this_thread() { return static_cast<ThreadId>(syscall(SYS_gettid)); }

std::int64_t processor_ns(ThreadId thread) {
  // How Linux numbers the clock of a thread: pthread_getcpuclockid() gives the same, but must not
  // be asked of a thread that may have ended.
  constexpr unsigned OF_A_THREAD = 4, AS_SCHEDULED = 2;
  const unsigned clock = ~static_cast<unsigned>(thread) << 3 | OF_A_THREAD | AS_SCHEDULED;
  timespec time;
  if (clock_gettime(static_cast<clockid_t>(clock), &time) != 0) return -1;
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

struct CoreLoan::Cores {
  cpu_set_t set;
};

CoreLoan::CoreLoan(ThreadId thread) : thread_(thread) {
  auto before = std::make_unique<Cores>();
  const int core = sched_getcpu();
  if (core < 0 || core >= CPU_SETSIZE) return;
  if (sched_getaffinity(thread, sizeof before->set, &before->set) != 0) return;
  if (!CPU_ISSET(core, &before->set)) return;
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(core, &here);
  if (sched_setaffinity(thread, sizeof here, &here) == 0) before_ = std::move(before);
}

CoreLoan::~CoreLoan() {
  if (before_ == nullptr) return;
  cpu_set_t others = before_->set;
  CPU_CLR(sched_getcpu(), &others);
  if (CPU_COUNT(&others) > 0) sched_setaffinity(thread_, sizeof others, &others);
  sched_setaffinity(thread_, sizeof before_->set, &before_->set);
}

}  // namespace octavo
