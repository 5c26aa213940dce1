#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/owner_process.h>

namespace torchspan {

/// Binary semaphore on which one thread at a time sleeps. unpark(), from any thread, leaves a token that
/// ends the current or the next park().
class Parker {
 public:
  virtual ~Parker() = default;
  /// Sleeps until unparked (true) or until the deadline (false).
  virtual bool park(Deadline deadline) = 0;
  virtual void unpark() = 0;
};

/// A Parker that also wakes for file descriptors (epoll). One thread waits at a time; wake() is
/// thread-safe.
class Poller {
 public:
  struct Event {
    std::uint64_t token;
    bool readable;
    bool writable;
    bool hung_up;
  };
  virtual ~Poller() = default;
  /// Watches `fd` for reading and optionally for writing, level-triggered. Its events carry `token`, any
  /// number but 2^64 - 1. Throws Error{kInvalid} for a descriptor that cannot be watched or already is.
  virtual void add(int fd, std::uint64_t token, bool writable) = 0;
  /// Changes whether `fd` is watched for writing.
  virtual void change(int fd, std::uint64_t token, bool writable) = 0;
  virtual void remove(int fd) = 0;
  /// Waits until the deadline for the first event and fills `events` (at least one slot); returns 0 on
  /// timeout or wake(). An expired deadline still checks once.
  virtual std::size_t wait(std::span<Event> events, Deadline deadline) = 0;
  /// Ends the current or the next wait().
  virtual void wake() = 0;
  /// Readable while wait() would return at once, so that pollers can be nested; -1 if not supported
  /// (simulated).
  virtual int descriptor() const { return -1; }
};

/// A running thread. Its destructor joins it, through the executor, so the thread may be simulated.
class Thread {
 public:
  struct Impl {
    virtual ~Impl() = default;  ///< joins the thread
    virtual bool is_current() const = 0;
  };
  Thread() = default;
  explicit Thread(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
  void join() { impl_.reset(); }
  bool joinable() const { return impl_ != nullptr; }
  bool is_current() const { return impl_ && impl_->is_current(); }

 private:
  std::unique_ptr<Impl> impl_;
};

using ThreadId = std::thread::id;

/// Source of threads, sleep and time. make_executor() uses the system's; SimExecutor runs one thread at a
/// time on a virtual clock. Thread-safe; must outlive everything made from it.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual TimePoint now() const = 0;
  virtual std::unique_ptr<Parker> make_parker() = 0;
  virtual std::unique_ptr<Poller> make_poller() = 0;
  /// Starts `body` on a new thread, named for debuggers and deadlock reports, and destroys its captures
  /// there. An exception that escapes `body` terminates the process. Throws Error{kOverloaded} when the
  /// system has no more threads.
  virtual Thread spawn(std::string name, std::function<void()> body) = 0;
  /// Lets another thread run.
  virtual void yield() = 0;
  /// How long a waiting thread may spin before it sleeps. Zero in simulation, on a single core, and for a
  /// while after a yield lost its core to other work, since a sleeping thread then wakes sooner.
  virtual Duration spin_limit() const = 0;

  Deadline deadline_in(Duration timeout) const;
  void sleep(Duration time);
  /// In a child forked from this process, nothing that was made from this executor may be used.
  const OwnerProcess& process() const { return process_; }

 private:
  const OwnerProcess process_;
};

/// Makes the executor of real threads and the system's monotonic clock.
std::unique_ptr<Executor> make_executor();

}  // namespace torchspan
