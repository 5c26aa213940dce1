#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>

#include "pipeline/messages/messages.h"

namespace torchspan::pipeline {

/// A worker of the world died or left.
struct Departure {
  std::uint32_t rank = 0;
  Error error{ErrorKind::kDisconnected, ""};
};
/// A message of ours did not arrive.
struct NotSent {
  StepId id;
  std::uint32_t rank = 0;
  Error error{ErrorKind::kDisconnected, ""};
};

using StepEvent = std::variant<StepBegin, Activations, Gradients, StepFailed, PartDone, StepClosed, Credit,
                               Departure, NotSent>;

/// What reaches one pipeline on one worker: put in by whoever receives, taken out by the thread that trains.
/// Thread-safe; waits for nothing.
class EventQueue {
 public:
  EventQueue(std::string name, std::weak_ptr<FutureHost> host)
      : name_(std::move(name)), host_(std::move(host)) {}

  const std::string& name() const { return name_; }
  void put(StepEvent event);
  /// The events of a step and the departures, in the order in which they came. Those of earlier steps are
  /// dropped, those of later ones kept.
  std::deque<StepEvent> take(std::uint64_t step);
  /// Letters that were taken too early, for the next take().
  void put_back(std::deque<StepEvent> events);
  /// Done when something has come since the last take().
  Future<void> arrival();

  /// What AskState is answered; by the thread that trains.
  void set_state(std::uint64_t step, bool in_step, bool busy, std::string doing, TimePoint since);
  WorkerState state(TimePoint now) const;

 private:
  const std::string name_;
  const std::weak_ptr<FutureHost> host_;
  mutable Mutex mutex_;
  std::deque<StepEvent> events_ TORCHSPAN_GUARDED_BY(mutex_);  ///< since the last take()
  std::deque<StepEvent> later_ TORCHSPAN_GUARDED_BY(mutex_);   ///< of steps that have not begun here
  std::optional<Promise<void>> waiting_ TORCHSPAN_GUARDED_BY(mutex_);
  WorkerState state_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint since_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::pipeline
