#pragma once
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/rpc/worker.h>

#include "pipeline/messages/messages.h"

namespace torchspan::pipeline {

/// A worker of the world died or left the job.
struct Departure {
  std::uint32_t rank = 0;
  Error error{ErrorKind::kDisconnected, ""};
};
/// A message of this worker did not arrive.
struct NotSent {
  StepId id;
  std::uint32_t rank = 0;
  Error error{ErrorKind::kDisconnected, ""};
};

using StepEvent =
    std::variant<StepBegin, Activations, Gradients, StepFailed, PartDone, StepClosed, Credit, TiedGradient,
                 ReplicaGradients, ReplicaStatistics, ReplicaDone, ReplicaBegin, Departure, NotSent>;

/// The step that an event belongs to; nullopt: any step.
std::optional<std::uint64_t> step_of(const StepEvent& event);

/// The events of one pipeline on one worker: receiving threads put them in, the training thread takes them
/// out. Also answers what other workers ask this one. Thread-safe; never blocks.
class EventQueue {
 public:
  EventQueue(std::string name, std::weak_ptr<ContinuationExecutor> continuations)
      : name_(std::move(name)), continuations_(std::move(continuations)) {}

  const std::string& name() const { return name_; }
  void put(StepEvent event);
  /// Returns the events of a step, and departures, in order of arrival. Drops events of earlier steps and
  /// keeps those of later steps.
  std::deque<StepEvent> take(std::uint64_t step) { return take(step, step); }
  /// The same for the steps from `first` to `last`, in order of arrival.
  std::deque<StepEvent> take(std::uint64_t first, std::uint64_t last);
  /// Returns events to the queue; the next take() sees them first.
  void put_back(std::deque<StepEvent> events);
  /// Waits until an event arrives, or returns at once if one arrived since the last take(). Returns false if none
  /// arrived within `limit`. Throws kCancelled if the worker has ended.
  bool wait(Duration limit);

  /// Sets the answer to AskState. Called by the training thread.
  void set_state(std::uint64_t step, bool in_step, bool busy, std::string doing, TimePoint since);
  WorkerState state(TimePoint now) const;

  /// Sets what AskInitialValues reads, while the pipeline is created. Undefined tensors are not offered.
  void offer(std::vector<at::Tensor> values);
  /// Throws Error{kInvalid} for an index that is not offered.
  std::vector<at::Tensor> offered(const std::vector<std::int32_t>& which) const;

 private:
  Future<void> arrival();

  const std::string name_;
  const std::weak_ptr<ContinuationExecutor> continuations_;
  mutable Mutex mutex_;
  std::deque<StepEvent> events_ TORCHSPAN_GUARDED_BY(mutex_);  ///< since the last take()
  std::deque<StepEvent> later_ TORCHSPAN_GUARDED_BY(mutex_);   ///< of steps that this worker has not begun
  std::optional<Promise<void>> waiting_ TORCHSPAN_GUARDED_BY(mutex_);
  WorkerState state_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint since_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<at::Tensor> offered_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Finds the event queue of a message's pipeline among those of one worker. Thread-safe.
class PipelineExtension::MessageRouter {
 public:
  explicit MessageRouter(Worker& worker) : worker_(worker.backend()->weak_from_this()) {}

  /// Id and event queue of a pipeline on this worker. The router does not own the queue.
  struct Opened {
    std::uint64_t id = 0;
    std::shared_ptr<EventQueue> event_queue;
  };
  /// The number of the next pipeline of these workers and name. A worker that took a dead one's place counts from 0,
  /// so the workers agree on the highest number.
  std::uint64_t next_number(const std::string& name, const std::string& workers);
  /// Registers the pipeline of these workers and name with the number that they have agreed on, from which its id
  /// is computed.
  Opened open(const std::string& name, const std::string& workers, std::uint64_t number,
              std::weak_ptr<ContinuationExecutor> continuations);
  /// Throws Error{kInvalid} if the pipeline does not exist or was destroyed.
  std::shared_ptr<EventQueue> find(std::uint64_t id);
  void departed(std::uint32_t rank, const Error& error);
  TimePoint now() const;

 private:
  const std::weak_ptr<rpc::WorkerBackend> worker_;
  Mutex mutex_;
  std::map<std::string, std::uint64_t> next_numbers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::weak_ptr<EventQueue>> event_queues_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::pipeline
