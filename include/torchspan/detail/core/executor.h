#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan {

/// One thread's place to sleep: a binary semaphore. unpark() from any thread leaves a token that ends the
/// current park() or the next one. A Parker may be used by one waiting thread at a time.
class Parker {
 public:
  virtual ~Parker() = default;
  /// Sleeps until unparked (true) or until the deadline passed (false).
  virtual bool park(Deadline deadline) = 0;
  virtual void unpark() = 0;
};

/// A Parker that also wakes for file descriptors (epoll). One thread waits at a time; wake() is for any
/// thread.
class Poller {
 public:
  struct Event {
    std::uint64_t token;
    bool readable;
    bool writable;
    bool hung_up;
  };
  virtual ~Poller() = default;
  /// Watches `fd` for reading and, if asked, for writing; `token`, any number but 2^64 - 1, comes back with
  /// its events. Level-triggered. Throws Error{kInvalid} for a descriptor that cannot be watched or is
  /// already.
  virtual void add(int fd, std::uint64_t token, bool writable) = 0;
  /// Changes whether `fd` is watched for writing.
  virtual void change(int fd, std::uint64_t token, bool writable) = 0;
  virtual void remove(int fd) = 0;
  /// Fills `events`, which has room for one at least, with what is ready, waiting until the deadline for the
  /// first; 0 on time-out or wake(). A deadline that has passed still looks once.
  virtual std::size_t wait(std::span<Event> events, Deadline deadline) = 0;
  /// Ends the current wait(), or the next one.
  virtual void wake() = 0;
  /// Readable while wait() would return at once, so that one poller may watch another; -1 if this one cannot
  /// be watched (simulated).
  virtual int descriptor() const { return -1; }
};

/// A running thread; its destructor waits for the thread's end (through the executor, so it may be
/// simulated).
class Thread {
 public:
  struct Impl {
    virtual ~Impl() = default;  ///< waits for the end
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

/// The one door to threads, sleep and time. The real one (make_executor) uses the system's; SimExecutor runs
/// one thread at a time on a virtual clock. Thread-safe; must outlive everything made from it.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual TimePoint now() const = 0;
  virtual std::unique_ptr<Parker> make_parker() = 0;
  virtual std::unique_ptr<Poller> make_poller() = 0;
  /// Starts `body` on a thread of its own, named for debuggers and deadlock reports; what `body` captured is
  /// destroyed there. An exception that leaves `body` ends the process. Throws Error{kOverloaded} when the
  /// system has no thread left.
  virtual Thread spawn(std::string name, std::function<void()> body) = 0;
  /// Lets another thread run.
  virtual void yield() = 0;
  /// How long a waiting thread may spin before it sleeps: zero in simulation, on a single core, and for a
  /// while after a yield has lost its core to other work, which wake-ups come by sooner.
  virtual Duration spin_limit() const = 0;

  Deadline deadline_in(Duration timeout) const;
  void sleep(Duration time);
};

/// The executor of real threads and the system's monotonic clock.
std::unique_ptr<Executor> make_executor();

}  // namespace torchspan
