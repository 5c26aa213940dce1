#include <atomic>
#include <cstdio>
#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <torchspan/detail/core/owner_process.h>

namespace torchspan {
namespace {

/// Counts the forks that led from the process that loaded this library to this one. fork() affects the whole process,
/// and its handlers take no argument, so there is one count per process; only the handler in a new child changes it.
class Forks {
 public:
  static Forks& of_process() {
    static Forks& only = *new Forks;
    return only;
  }
  std::uint32_t count() const { return count_.load(std::memory_order_relaxed); }

 private:
  Forks() {
    pthread_atfork(nullptr, nullptr, [] { of_process().count_.fetch_add(1, std::memory_order_relaxed); });
  }
  std::atomic<std::uint32_t> count_{0};
};

}  // namespace

OwnerProcess::OwnerProcess() noexcept : forks_(Forks::of_process().count()) {}

bool OwnerProcess::is_current() const noexcept { return forks_ == Forks::of_process().count(); }

Error OwnerProcess::forked(std::string_view worker) {
  return Error(
      ErrorKind::kInvalid,
      fmt::format("this process ({}) is a fork of {}, and has neither its threads nor its connections: "
                  "start a new process instead (fork and exec), or let the worker make the call and "
                  "pass the result to this process",
                  ::getpid(), worker.empty() ? "a worker" : fmt::format("worker '{}'", worker)));
}

void OwnerProcess::end_forked(std::string_view worker) noexcept {
  std::fputs(
      fmt::format(
          "torchspan[{}] error: a process that was forked in a handler or a continuation returned from "
          "it, and ends here (pid {}): let it call exec() or _exit()\n",
          worker, ::getpid())
          .c_str(),
      stderr);
  ::_exit(1);
}

void keep_until_exit(const void* object) noexcept {
  struct Kept {
    const void* object;
    Kept* next;
  };
  static std::atomic<Kept*> all{nullptr};
  auto* const kept = new Kept{object, all.load(std::memory_order_relaxed)};
  while (!all.compare_exchange_weak(kept->next, kept)) {
  }
}

}  // namespace torchspan
