#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>

#include <torchspan/detail/core/executor.h>

namespace torchspan {

/// Runs a whole cluster in one process, deterministic from a seed. Threads are real, but only one registered
/// thread runs at a time; when it parks, the seed chooses the next runnable one. When all are parked, the
/// virtual clock jumps to the next deadline or event; while all runnable threads only poll, a poll takes 1
/// us. On a deadlock the process prints the stack of every thread and aborts. Pollers take no descriptors.
/// Only simulated threads may park, yield and join; others get Error{kInvalid}.
class SimExecutor final : public Executor {
 public:
  explicit SimExecutor(std::uint64_t seed);
  ~SimExecutor() override;

  /// Runs `main` as the first simulated thread; returns when it and all threads that it started have ended.
  /// Rethrows what `main` throws. Call it from an ordinary thread, one call at a time; a later call continues
  /// at the same virtual time.
  void run(std::function<void()> main);

  /// Runs `event` at virtual time `when`, on whichever thread advances the clock. `event` must not park or
  /// throw.
  void at(TimePoint when, std::function<void()> event);
  /// Returns the next number of the seed's random sequence; for simulated threads and events only.
  std::uint64_t random();
  std::uint64_t seed() const;
  /// Returns the number of scheduling decisions so far; equal seeds give equal numbers.
  std::uint64_t steps() const;

  TimePoint now() const override;
  std::unique_ptr<Parker> make_parker() override;
  std::unique_ptr<Poller> make_poller() override;
  Thread spawn(std::string name, std::function<void()> body) override;
  void yield() override;
  Duration spin_limit() const override { return spin_limit_; }
  /// Sets how much virtual time a waiting thread polls before it sleeps. With a limit above zero, a waiting
  /// caller drives its worker's transport, as on real threads. Call it before run(); the default is zero.
  void set_spin_limit(Duration limit) { spin_limit_ = limit; }

  class Impl;

 private:
  std::shared_ptr<Impl> impl_;
  Duration spin_limit_{};
};

}  // namespace torchspan
