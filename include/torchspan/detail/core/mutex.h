#pragma once
#include <mutex>

#if defined(__clang__)
#define TORCHSPAN_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TORCHSPAN_THREAD_ANNOTATION(x)
#endif
#define TORCHSPAN_CAPABILITY(x) TORCHSPAN_THREAD_ANNOTATION(capability(x))
#define TORCHSPAN_SCOPED_CAPABILITY TORCHSPAN_THREAD_ANNOTATION(scoped_lockable)
#define TORCHSPAN_GUARDED_BY(x) TORCHSPAN_THREAD_ANNOTATION(guarded_by(x))
#define TORCHSPAN_REQUIRES(...) TORCHSPAN_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define TORCHSPAN_EXCLUDES(...) TORCHSPAN_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define TORCHSPAN_ACQUIRE(...) TORCHSPAN_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define TORCHSPAN_RELEASE(...) TORCHSPAN_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define TORCHSPAN_TRY_ACQUIRE(...) TORCHSPAN_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define TORCHSPAN_UNCHECKED TORCHSPAN_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace torchspan {

/// A mutex known to clang's thread-safety analysis. Hold it for microseconds, never across a park or user
/// code: this rule lets the simulated executor run one thread at a time without deadlock.
class TORCHSPAN_CAPABILITY("mutex") Mutex {
 public:
  void lock() TORCHSPAN_ACQUIRE() { mutex_.lock(); }
  void unlock() TORCHSPAN_RELEASE() { mutex_.unlock(); }
  bool try_lock() TORCHSPAN_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

/// Holds a Mutex for a scope.
class TORCHSPAN_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TORCHSPAN_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() TORCHSPAN_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace torchspan
