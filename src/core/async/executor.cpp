#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fmt/format.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"

namespace torchspan {
namespace {

TimePoint real_now() { return TimePoint(std::chrono::steady_clock::now().time_since_epoch()); }

[[noreturn]] void throw_exhausted(const char* what) {
  const int reason = errno;
  throw Error(ErrorKind::kOverloaded,
              fmt::format("{} failed: {}; {}", what, std::strerror(reason),
                          reason == EMFILE ? "raise the limit of open files (ulimit -n)"
                                           : "check the limits of this process (ulimit -a)"));
}

/// The kernel refuses times before the start of its clock; for a wait, all of them mean "already passed".
timespec to_timespec(TimePoint at) {
  const auto since = std::max(at.time_since_epoch(), Duration::zero());
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(since);
  return {static_cast<time_t>(seconds.count()), static_cast<long>((since - seconds).count())};
}

/// A futex word: 0 nothing, 1 token, 2 a sleeper.
class ThreadParker final : public Parker {
 public:
  bool park(Deadline deadline) override {
    int expected = kToken;
    if (word_.compare_exchange_strong(expected, kEmpty, std::memory_order_acquire)) return true;
    process_.check();  // no thread is left that could end the sleep
    expected = kEmpty;
    if (!word_.compare_exchange_strong(expected, kSleeping, std::memory_order_acquire)) return take_token();
    while (word_.load(std::memory_order_acquire) == kSleeping) {
      if (!sleep_until(deadline)) break;
    }
    // The token may have arrived together with the deadline: it then counts.
    return take_token();
  }

  void unpark() override {
    if (word_.exchange(kToken, std::memory_order_release) == kSleeping) {
      syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
  }

 private:
  static constexpr int kEmpty = 0, kToken = 1, kSleeping = 2;

  /// Uses an exchange: a plain store could overwrite a second token without seeing what its unparker wrote
  /// before, and that wake-up would be lost.
  bool take_token() { return word_.exchange(kEmpty, std::memory_order_acquire) == kToken; }

  bool sleep_until(Deadline deadline) {
    timespec until{};
    timespec* timeout = nullptr;
    if (!deadline.is_never()) {
      until = to_timespec(deadline.at());
      timeout = &until;
    }
    // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, the clock that steady_clock reads.
    const long rc = syscall(SYS_futex, &word_, FUTEX_WAIT_BITSET_PRIVATE, kSleeping, timeout, nullptr,
                            FUTEX_BITSET_MATCH_ANY);
    return !(rc == -1 && errno == ETIMEDOUT);
  }

  const OwnerProcess process_;
  std::atomic<int> word_{kEmpty};
  static_assert(sizeof(std::atomic<int>) == sizeof(int));
};

class EpollPoller final : public Poller {
 public:
  EpollPoller() : epoll_{epoll_create1(EPOLL_CLOEXEC)}, wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)} {
    if (epoll_.fd < 0 || wake_.fd < 0) throw_exhausted("making an epoll descriptor");
    control(EPOLL_CTL_ADD, wake_.fd, kWakeToken, false);
  }
  void add(int fd, std::uint64_t token, bool writable) override {
    check_token(token);
    control(EPOLL_CTL_ADD, fd, token, writable);
  }
  void change(int fd, std::uint64_t token, bool writable) override {
    check_token(token);
    control(EPOLL_CTL_MOD, fd, token, writable);
  }
  void remove(int fd) override { epoll_ctl(epoll_.fd, EPOLL_CTL_DEL, fd, nullptr); }

  std::size_t wait(std::span<Event> events, Deadline deadline) override {
    if (events.empty()) {
      throw_invalid("Poller::wait needs space for at least one event");
    }
    process_.check();
    std::array<epoll_event, 64> ready;
    const auto room = static_cast<int>(std::min(events.size(), ready.size()));
    int count;
    do {
      count = wait_once(ready.data(), room, deadline);
    } while (count < 0 && errno == EINTR);
    if (count < 0) throw_exhausted("epoll_wait");
    std::size_t filled = 0;
    for (int i = 0; i < count; ++i) {
      if (ready[i].data.u64 == kWakeToken) {
        drain_wake();
        continue;
      }
      events[filled++] = {ready[i].data.u64, (ready[i].events & (EPOLLIN | EPOLLRDHUP)) != 0,
                          (ready[i].events & EPOLLOUT) != 0, (ready[i].events & (EPOLLHUP | EPOLLERR)) != 0};
    }
    return filled;
  }

  void wake() override {
    if (!process_.is_current()) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.fd, &one, sizeof one);
  }

  int descriptor() const override { return epoll_.fd; }

 private:
  static constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};

  struct Descriptor {
    int fd;
    ~Descriptor() {
      if (fd >= 0) close(fd);
    }
  };

  static void check_token(std::uint64_t token) {
    if (token != kWakeToken) return;
    throw_invalid("the token 2^64 - 1 is the poller's own; use another");
  }

  int wait_once(epoll_event* ready, int room, Deadline deadline) const {
    if (deadline.is_never()) return epoll_wait(epoll_.fd, ready, room, -1);
    const auto left = deadline.left(real_now());
    if (!has_nanoseconds_.load(std::memory_order_relaxed)) return wait_milliseconds(ready, room, left);
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec timeout{static_cast<time_t>(seconds.count()), static_cast<long>((left - seconds).count())};
    const int count = epoll_pwait2(epoll_.fd, ready, room, &timeout, nullptr);
    if (count >= 0 || (errno != ENOSYS && errno != EPERM)) return count;
    has_nanoseconds_.store(false, std::memory_order_relaxed);  // before Linux 5.11, and in some containers
    return wait_milliseconds(ready, room, left);
  }

  /// Waits a little longer rather than too short.
  int wait_milliseconds(epoll_event* ready, int room, Duration left) const {
    const auto whole = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    return epoll_wait(epoll_.fd, ready, room, static_cast<int>(std::min<std::int64_t>(whole, 1 << 30)));
  }

  void drain_wake() const {
    std::uint64_t count;
    [[maybe_unused]] const auto got = read(wake_.fd, &count, sizeof count);
  }

  void control(int operation, int fd, std::uint64_t token, bool writable) const {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0u);
    event.data.u64 = token;
    if (epoll_ctl(epoll_.fd, operation, fd, &event) == 0) return;
    if (errno == ENOMEM || errno == ENOSPC) throw_exhausted("watching a descriptor");
    throw_invalid("descriptor {} cannot be {}: {}", fd, operation == EPOLL_CTL_ADD ? "watched" : "changed",
                  std::strerror(errno));
  }

  const OwnerProcess process_;
  Descriptor epoll_;
  Descriptor wake_;
  mutable std::atomic<bool> has_nanoseconds_{true};
};

class ThreadImpl final : public Thread::Impl {
 public:
  ThreadImpl(const std::string& name, std::function<void()> body) : thread_(std::move(body)) {
    pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
  }
  /// A forked child has no such thread.
  ~ThreadImpl() override {
    process_.is_current() ? thread_.join() : keep_until_exit(new std::thread(std::move(thread_)));
  }
  bool is_current() const override { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  const OwnerProcess process_;
  std::thread thread_;
};

class ThreadExecutor final : public Executor {
 public:
  TimePoint now() const override { return real_now(); }
  std::unique_ptr<Parker> make_parker() override { return std::make_unique<ThreadParker>(); }
  std::unique_ptr<Poller> make_poller() override { return std::make_unique<EpollPoller>(); }
  Thread spawn(std::string name, std::function<void()> body) override {
    process().check();
    try {
      return Thread(std::make_unique<ThreadImpl>(name, std::move(body)));
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::kOverloaded,
                  fmt::format("thread '{}' could not start: {}; check the limits of this process (ulimit -u)",
                              name, error.what()));
    }
  }
  void yield() override {
    const TimePoint begin = real_now();
    sched_yield();
    const TimePoint end = real_now();
    if (end - begin > kLostCore) crowded_until_.store(end + kCrowded, std::memory_order_relaxed);
  }
  Duration spin_limit() const override {
    const TimePoint crowded_until = crowded_until_.load(std::memory_order_relaxed);
    return crowded_until != TimePoint::min() && real_now() < crowded_until ? Duration::zero() : most_;
  }

 private:
  /// A yield that takes longer has given the core to other work for a whole time slice.
  static constexpr Duration kLostCore = std::chrono::milliseconds(1);
  static constexpr Duration kCrowded = std::chrono::milliseconds(200);

  const Duration most_ = std::thread::hardware_concurrency() > 1 ? std::chrono::microseconds(150)
                                                                 : Duration::zero();
  std::atomic<TimePoint> crowded_until_{TimePoint::min()};
};

}  // namespace

Deadline Executor::deadline_in(Duration timeout) const { return deadline_after(now(), timeout); }

void Executor::sleep(Duration time) {
  auto parker = make_parker();
  const Deadline end = deadline_in(time);
  while (parker->park(end)) {
  }
}

std::unique_ptr<Executor> make_executor() { return std::make_unique<ThreadExecutor>(); }

}  // namespace torchspan
