#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include <torchspan/detail/core/executor.h>

namespace torchspan {

/// A whole cluster in one process, deterministic from a seed: threads are real, but exactly one registered
/// thread runs at a time; when it parks, the next runnable one is drawn from the seed; when all are parked
/// the virtual clock jumps to the next deadline or event. While every runnable thread only polls (yields, or
/// parks with a deadline that has passed) a poll takes 1 us. If nothing can ever wake, the process prints
/// every thread with its place of rest and aborts: a deadlock is a bug, never a hang. Pollers take no
/// descriptors here. Only simulated threads park, yield and join; others get Error{kInvalid}.
class SimExecutor final : public Executor {
 public:
  explicit SimExecutor(std::uint64_t seed);
  ~SimExecutor() override;

  /// Runs `main` as the first simulated thread; returns when it and every thread it caused have ended.
  /// Rethrows what `main` throws. Called from an ordinary thread; once at a time, but as often as you like:
  /// time goes on where it stopped.
  void run(std::function<void()> main);

  /// Runs `event` at virtual time `when`, on whichever thread advances the clock: it must not park
  /// nor throw.
  void at(TimePoint when, std::function<void()> event);
  /// A number from the seed's stream; only simulated threads and events draw.
  std::uint64_t random();
  std::uint64_t seed() const;
  /// How many scheduling decisions were made; equal for equal seeds.
  std::uint64_t steps() const;

  TimePoint now() const override;
  std::unique_ptr<Parker> make_parker() override;
  std::unique_ptr<Poller> make_poller() override;
  Thread spawn(std::string name, std::function<void()> body) override;
  void yield() override;
  Duration spin_limit() const override { return spin_limit_; }
  /// Lets waiting threads poll for this long of virtual time before they sleep, as real ones do: then a
  /// caller that waits drives its worker's transport. Set before run(); zero (the default): they sleep at
  /// once.
  void set_spin_limit(Duration limit) { spin_limit_ = limit; }

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
  Duration spin_limit_{};
};

}  // namespace torchspan
