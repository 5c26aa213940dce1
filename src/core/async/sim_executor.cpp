#include "core/api/sim_executor.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan {
namespace {

constexpr int kMostFrames = 24;

std::string name_of(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return fmt::format("{}", address);
  if (info.dli_sname != nullptr) {
    int status = 0;
    std::unique_ptr<char, void (*)(void*)> name(
        abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), std::free);
    return status == 0 ? name.get() : info.dli_sname;
  }
  const auto offset =
      reinterpret_cast<std::uintptr_t>(address) - reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  const std::string_view path = info.dli_fname;
  return fmt::format("{}+{:#x}", path.substr(path.rfind('/') + 1), offset);
}

/// Returns the calling thread's stack, one indented line per frame, innermost first. Functions without an
/// exported name appear as binary+0xoffset, which addr2line understands.
std::string stack_of_this_thread() {
  std::array<void*, kMostFrames> frames{};
  const int count = backtrace(frames.data(), kMostFrames);
  std::string text;
  for (int i = 1; i < count; ++i) text += fmt::format("      {}\n", name_of(frames[i]));
  return text;
}

class SimParker;

enum class State { kRunnable, kRunning, kParked, kEnded };

struct SimThread {
  std::string name;
  std::thread::id id;
  State state = State::kRunnable;
  Deadline deadline;
  TimePoint parked_at;
  bool unparked = false;  ///< why the last park ended
  bool polling = false;   ///< runnable, but only because it yielded
  std::condition_variable go;
  SimParker* joiner = nullptr;  ///< unparked when the thread ends
};

}  // namespace

/// The scheduler. `current_` is the running thread; null while an event runs.
class SimExecutor::Impl {
 public:
  explicit Impl(std::uint64_t seed) : seed_(seed), random_(seed) {}

  std::shared_ptr<SimThread> add_thread(std::string name) {
    auto thread = std::make_shared<SimThread>();
    thread->name = std::move(name);
    std::lock_guard lock(mutex_);
    threads_.push_back(thread);
    runnable_.push_back(thread.get());
    return thread;
  }

  /// Removes a thread that the system could not start.
  void forget(const SimThread& thread) {
    std::lock_guard lock(mutex_);
    std::erase(runnable_, &thread);
    std::erase_if(threads_, [&](const auto& other) { return other.get() == &thread; });
  }

  /// Runs a simulated thread on its real one.
  void live(SimThread& self, std::function<void()> body) {
    {
      std::unique_lock lock(mutex_);
      self.id = std::this_thread::get_id();
      wait_for_turn(lock, self);
    }
    body();
    body = nullptr;  // destroys what `body` captured while no other thread runs
    std::unique_lock lock(mutex_);
    self.state = State::kEnded;
    if (self.joiner != nullptr) unpark_locked(*self.joiner);
    std::erase_if(threads_, [&](const auto& thread) { return thread.get() == &self; });
    run_next(lock);
  }

  void start_and_wait() {
    std::unique_lock lock(mutex_);
    run_next(lock);
    all_ended_.wait(lock, [&] { return current_ == nullptr && threads_.empty(); });
  }

  bool park(SimParker& parker, Deadline deadline);
  void unpark(SimParker& parker) {
    std::lock_guard lock(mutex_);
    unpark_locked(parker);
  }
  void join(SimThread& thread, SimParker& parker);

  void yield() {
    std::unique_lock lock(mutex_);
    yield_turn(lock, caller("yield"));
  }

  void at(TimePoint when, std::function<void()> event) {
    std::lock_guard lock(mutex_);
    events_.emplace(std::max(when, now_), std::move(event));
  }

  void begin_run() {
    std::lock_guard lock(mutex_);
    if (running_) throw_invalid("this SimExecutor is already running; call run() after it has returned");
    running_ = true;
    main_failure_.clear();
  }
  void end_run() {
    std::lock_guard lock(mutex_);
    running_ = false;
  }
  void main_failed(std::string description) {
    std::lock_guard lock(mutex_);
    main_failure_ = std::move(description);
  }

  TimePoint now() const {
    std::lock_guard lock(mutex_);
    return now_;
  }
  std::uint64_t random() {
    std::lock_guard lock(mutex_);
    return random_();
  }
  std::uint64_t seed() const { return seed_; }
  std::uint64_t steps() const {
    std::lock_guard lock(mutex_);
    return steps_;
  }

 private:
  /// The cost of one poll; without it, two polling threads could stop the clock.
  static constexpr Duration kPollTime = std::chrono::microseconds(1);

  void unpark_locked(SimParker& parker);

  SimThread& caller(const char* verb) {
    if (current_ != nullptr && current_->id == std::this_thread::get_id()) return *current_;
    throw_invalid(
        "{}: only threads of this simulated executor may call it (spawn() them, or call it inside run()); "
        "events may not",
        verb);
  }

  void wait_for_turn(std::unique_lock<std::mutex>& lock, SimThread& self) {
    for (;;) {
      self.go.wait(lock, [&] { return current_ == &self || witness_ == &self; });
      if (witness_ != &self) break;
      std::fputs(stack_of_this_thread().c_str(), stderr);
      witness_ = nullptr;
      witnessed_.notify_all();
    }
    self.state = State::kRunning;
  }

  void make_runnable(SimThread& thread, bool unparked) {
    thread.state = State::kRunnable;
    thread.unparked = unparked;
    thread.polling = false;
    runnable_.push_back(&thread);
  }

  void yield_turn(std::unique_lock<std::mutex>& lock, SimThread& self) {
    make_runnable(self, false);
    self.polling = true;
    current_ = nullptr;
    const bool all_poll =
        std::all_of(runnable_.begin(), runnable_.end(), [](const auto* thread) { return thread->polling; });
    if (all_poll) now_ += kPollTime;
    fire_due(lock);
    run_next(lock);
    wait_for_turn(lock, self);
  }

  /// Lets a thread run that the seed chooses; advances the clock while no thread is runnable.
  void run_next(std::unique_lock<std::mutex>& lock) {
    current_ = nullptr;
    while (runnable_.empty()) {
      if (threads_.empty()) {
        all_ended_.notify_all();
        return;
      }
      advance(lock);
    }
    ++steps_;
    const std::size_t pick = random_() % runnable_.size();
    current_ = runnable_[pick];
    runnable_.erase(runnable_.begin() + static_cast<std::ptrdiff_t>(pick));
    current_->go.notify_one();
  }

  void advance(std::unique_lock<std::mutex>& lock) {
    TimePoint next = events_.empty() ? TimePoint::max() : events_.begin()->first;
    for (const auto& thread : threads_) {
      if (thread->state == State::kParked) next = std::min(next, thread->deadline.at());
    }
    if (next == TimePoint::max()) report_deadlock(lock);
    now_ = std::max(now_, next);
    fire_due(lock);
  }

  /// Wakes the threads and runs the events that are due.
  void fire_due(std::unique_lock<std::mutex>& lock) {
    for (const auto& thread : threads_) {
      if (thread->state == State::kParked && thread->deadline.passed(now_)) make_runnable(*thread, false);
    }
    while (!events_.empty() && events_.begin()->first <= now_) {
      auto event = std::move(events_.begin()->second);
      events_.erase(events_.begin());
      lock.unlock();
      run_event(std::move(event));
      lock.lock();
    }
  }

  /// Runs and destroys the event, both without the lock.
  static void run_event(std::function<void()> event) noexcept { event(); }

  /// Prints every thread with its stack; each thread prints its own, since no other thread can.
  [[noreturn]] void report_deadlock(std::unique_lock<std::mutex>& lock) {
    std::string text = fmt::format(
        "simulated cluster is deadlocked: nothing can ever wake it (seed {}, {} steps, virtual time {} us)\n",
        seed_, steps_, to_us(now_));
    if (!main_failure_.empty()) text += fmt::format("  main ended with {}\n", main_failure_);
    std::fputs(text.c_str(), stderr);
    const auto threads = threads_;
    for (const auto& thread : threads) {
      text = fmt::format("  thread '{}' has been parked without a deadline since {} us at\n", thread->name,
                         to_us(thread->parked_at));
      std::fputs(text.c_str(), stderr);
      if (thread->id == std::this_thread::get_id()) {
        std::fputs(stack_of_this_thread().c_str(), stderr);
        continue;
      }
      witness_ = thread.get();
      thread->go.notify_one();
      witnessed_.wait(lock, [&] { return witness_ == nullptr; });
    }
    std::fputs("  (addr2line -Cfpie BINARY OFFSET... gives names and lines)\n", stderr);
    std::abort();
  }

  static std::int64_t to_us(TimePoint time) {
    return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  }

  const std::uint64_t seed_;
  mutable std::mutex mutex_;
  std::condition_variable all_ended_;
  std::mt19937_64 random_;
  TimePoint now_{};
  std::uint64_t steps_ = 0;
  bool running_ = false;
  std::string main_failure_;
  SimThread* current_ = nullptr;
  std::vector<std::shared_ptr<SimThread>> threads_;
  std::vector<SimThread*> runnable_;
  std::multimap<TimePoint, std::function<void()>> events_;
  SimThread* witness_ = nullptr;  ///< the thread that must print its stack after a deadlock
  std::condition_variable witnessed_;

  friend class SimExecutor;
};

namespace {

class SimParker final : public Parker {
 public:
  explicit SimParker(SimExecutor::Impl& impl) : impl_(impl) {}
  bool park(Deadline deadline) override { return impl_.park(*this, deadline); }
  void unpark() override { impl_.unpark(*this); }

  bool take_token() { return std::exchange(token, false); }

  bool token = false;
  SimThread* sleeper = nullptr;

 private:
  SimExecutor::Impl& impl_;
};

class SimPoller final : public Poller {
 public:
  explicit SimPoller(SimExecutor::Impl& impl) : parker_(impl) {}
  void add(int, std::uint64_t, bool) override { refuse(); }
  void change(int, std::uint64_t, bool) override { refuse(); }
  void remove(int) override {}
  std::size_t wait(std::span<Event>, Deadline deadline) override {
    parker_.park(deadline);
    return 0;
  }
  void wake() override { parker_.unpark(); }

 private:
  [[noreturn]] static void refuse() {
    throw Error(ErrorKind::kUnsupported,
                "a simulated executor cannot watch file descriptors: use the sim transport");
  }
  SimParker parker_;
};

class SimThreadHandle final : public Thread::Impl {
 public:
  SimThreadHandle(SimExecutor::Impl& impl, std::shared_ptr<SimThread> thread, std::function<void()> body)
      : impl_(impl),
        thread_(std::move(thread)),
        real_([this, body = std::move(body)]() mutable { impl_.live(*thread_, std::move(body)); }) {}
  ~SimThreadHandle() override {
    SimParker parker(impl_);
    impl_.join(*thread_, parker);
    real_.join();
  }
  bool is_current() const override { return real_.get_id() == std::this_thread::get_id(); }

 private:
  SimExecutor::Impl& impl_;
  std::shared_ptr<SimThread> thread_;
  std::thread real_;
};

}  // namespace

bool SimExecutor::Impl::park(SimParker& parker, Deadline deadline) {
  std::unique_lock lock(mutex_);
  SimThread& self = caller("park");
  if (parker.take_token()) return true;
  if (deadline.passed(now_)) {
    yield_turn(lock, self);
    return parker.take_token();
  }
  self.state = State::kParked;
  self.deadline = deadline;
  self.parked_at = now_;
  parker.sleeper = &self;
  run_next(lock);
  wait_for_turn(lock, self);
  parker.sleeper = nullptr;
  return self.unparked || parker.take_token();
}

void SimExecutor::Impl::unpark_locked(SimParker& parker) {
  if (parker.sleeper != nullptr && parker.sleeper->state == State::kParked) {
    make_runnable(*parker.sleeper, true);
  } else {
    parker.token = true;
  }
}

void SimExecutor::Impl::join(SimThread& thread, SimParker& parker) {
  {
    std::lock_guard lock(mutex_);
    if (thread.state == State::kEnded) return;
    thread.joiner = &parker;
  }
  park(parker, Deadline::never());
}

SimExecutor::SimExecutor(std::uint64_t seed) : impl_(std::make_shared<Impl>(seed)) {}
SimExecutor::~SimExecutor() = default;

void SimExecutor::run(std::function<void()> main) {
  impl_->begin_run();
  std::exception_ptr failure;
  auto thread = impl_->add_thread("main");
  std::thread real([&] {
    impl_->live(*thread, [&] {
      try {
        std::exchange(main, nullptr)();
      } catch (...) {
        failure = std::current_exception();
        const ExceptionDescription description = describe(failure);
        impl_->main_failed(fmt::format("{}: {}", description.type, description.text));
      }
    });
  });
  impl_->start_and_wait();
  real.join();
  impl_->end_run();
  if (failure) std::rethrow_exception(failure);
}

void SimExecutor::at(TimePoint when, std::function<void()> event) { impl_->at(when, std::move(event)); }
std::uint64_t SimExecutor::random() { return impl_->random(); }
std::uint64_t SimExecutor::seed() const { return impl_->seed(); }
std::uint64_t SimExecutor::steps() const { return impl_->steps(); }
TimePoint SimExecutor::now() const { return impl_->now(); }
std::unique_ptr<Parker> SimExecutor::make_parker() { return std::make_unique<SimParker>(*impl_); }
std::unique_ptr<Poller> SimExecutor::make_poller() { return std::make_unique<SimPoller>(*impl_); }
void SimExecutor::yield() { impl_->yield(); }

Thread SimExecutor::spawn(std::string name, std::function<void()> body) {
  auto thread = impl_->add_thread(name);
  try {
    return Thread(std::make_unique<SimThreadHandle>(*impl_, thread, std::move(body)));
  } catch (const std::system_error& error) {
    impl_->forget(*thread);
    throw Error(ErrorKind::kOverloaded,
                fmt::format("simulated thread '{}' could not start: {}", name, error.what()));
  }
}

}  // namespace torchspan
