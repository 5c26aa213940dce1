#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include <torchspan/detail/core/executor.h>

namespace torchspan::testing {

/// Real threads, with a clock that a test can move forward: what waits for a limit ends then. So limits can be long, and do
/// not pass early on a busy machine. Whatever waits looks at the clock every few milliseconds.
class MovableClock final : public Executor {
 public:
  /// Is also ahead by `common`, which several clocks may share.
  MovableClock(Executor& real, const std::atomic<Duration::rep>& common) : real_(real), common_(common) {}

  void move_forward(Duration by) { ahead_ += by.count(); }
  TimePoint now() const override { return real_.now() + ahead(); }
  std::unique_ptr<Parker> make_parker() override {
    return std::make_unique<LookingParker>(*this, real_.make_parker());
  }
  std::unique_ptr<Poller> make_poller() override {
    return std::make_unique<LookingPoller>(*this, real_.make_poller());
  }
  Thread spawn(std::string name, std::function<void()> body) override {
    return real_.spawn(std::move(name), std::move(body));
  }
  void yield() override { real_.yield(); }
  Duration spin_limit() const override { return real_.spin_limit(); }

 private:
  class LookingParker final : public Parker {
   public:
    LookingParker(MovableClock& clock, std::unique_ptr<Parker> real)
        : clock_(clock), real_(std::move(real)) {}
    bool park(Deadline deadline) override {
      do {
        if (real_->park(clock_.next_look(deadline))) return true;
      } while (!deadline.passed(clock_.now()));
      return false;
    }
    void unpark() override { real_->unpark(); }

   private:
    MovableClock& clock_;
    const std::unique_ptr<Parker> real_;
  };

  class LookingPoller final : public Poller {
   public:
    LookingPoller(MovableClock& clock, std::unique_ptr<Poller> real)
        : clock_(clock), real_(std::move(real)) {}
    void add(int fd, std::uint64_t token, bool writable) override { real_->add(fd, token, writable); }
    void change(int fd, std::uint64_t token, bool writable) override { real_->change(fd, token, writable); }
    void remove(int fd) override { real_->remove(fd); }
    /// May return early, as after a wake().
    std::size_t wait(std::span<Event> events, Deadline deadline) override {
      return real_->wait(events, clock_.next_look(deadline));
    }
    void wake() override { real_->wake(); }
    int descriptor() const override { return real_->descriptor(); }

   private:
    MovableClock& clock_;
    const std::unique_ptr<Poller> real_;
  };

  Duration ahead() const { return Duration(ahead_ + common_); }
  /// In real time.
  Deadline next_look(Deadline deadline) const {
    if (deadline.passed(now())) return Deadline(TimePoint::min());
    const Deadline look = real_.deadline_in(std::chrono::milliseconds(5));
    return deadline.is_never() ? look : std::min(look, Deadline(deadline.at() - ahead()));
  }

  Executor& real_;
  std::atomic<Duration::rep> ahead_{0};
  const std::atomic<Duration::rep>& common_;
};

}  // namespace torchspan::testing
