#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/StreamGuard.h>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/spans.h>

#include "collective/api/event_gate.h"
#include "collective/device/device_engine.h"
#include "collective/group_executor.h"
#include "collective/tensors.h"
#include "collective/world_link.h"
#include "core/api/step_part.h"

namespace torchspan::collective {

/// Operations that a device is working on, with what they use. Used by one thread.
class LaunchedWork {
 public:
  struct Launch {
    std::string call;
    std::string text;          ///< the operation, as in "all_reduce(Float [4], sum)"
    std::uint64_t number = 0;  ///< of the operation in its group
    TimePoint at;
    std::shared_ptr<EventGate> gate;
    std::shared_ptr<void> uses;  ///< released when the work is finished
    std::function<void()> keep;  ///< makes the memory outlast the work; for work that is released unfinished
  };

  void add(Launch launch) { launches_.push_back(std::move(launch)); }
  bool empty() const { return launches_.empty(); }
  /// Releases finished operations.
  void release_finished();
  /// The oldest operation that has been running since `since` or longer; null if there is none.
  const Launch* overdue(TimePoint since) const;
  /// Lists the oldest operation as open if it has been running since `since` or longer. `group`: number of the group.
  void list_late(SpanRecorder& spans, TimePoint since, int group);
  /// Takers of the unfinished results get `cause`.
  void fail(const Error& cause);
  /// Releases everything, after the work has been aborted.
  void release();

 private:
  std::deque<Launch> launches_;
  std::optional<SpanScope> listed_;
  std::uint64_t listed_number_ = 0;
};

/// Numbers that the ranks exchange with a call, by rank.
using CallNumbers = std::vector<std::vector<std::int64_t>>;

struct DeviceQueueOptions {
  c10::Device device;
  GroupMembers members = {};
  int rank = 0;
  Duration timeout = std::chrono::minutes(5);
  std::shared_ptr<WorldLink> world = {};  ///< may be null; a death that it reports breaks the group at once
  std::function<std::optional<Error>()> departed = {};  ///< as in EngineParts
};

/// One operation on a device. `prepare` runs when all calls agree, under the stream of the caller, and may
/// allocate there; then `launch` under the group's stream. Both see what was captured until the work is done.
struct DeviceOperation {
  std::string line;
  std::vector<std::int64_t> numbers = {};  ///< equally many on all ranks
  UniqueFunction<void(const CallNumbers&)> prepare = {};
  UniqueFunction<void()> launch;
  UniqueFunction<std::vector<at::Tensor>()> values;  ///< the result's tensors, after `launch`
};

/// Runs the operations of one rank in the order of their calls. A call goes to the other ranks through the
/// control group first; the group's thread launches it on the group's stream when all ranks have made it.
/// Therefore no kernel waits for a rank that has not arrived. Work that does not end in time, or whose rank died,
/// is aborted, and takers of its results get the failure.
class DeviceQueue final : public WorldListener, public std::enable_shared_from_this<DeviceQueue> {
 public:
  static std::shared_ptr<DeviceQueue> make(std::shared_ptr<Backend> control,
                                           std::unique_ptr<DeviceEngine> engine,
                                           std::shared_ptr<GroupFailure> failure, DeviceQueueOptions options);
  ~DeviceQueue() override;

  DeviceEngine& engine() { return *engine_; }
  Backend& control() const { return *control_; }
  const DeviceQueueOptions& options() const { return options_; }
  const std::shared_ptr<ContinuationExecutor>& continuations() const { return promised_continuations_; }
  const std::shared_ptr<GroupFailure>& failure() const { return failure_; }
  /// As Backend::set_instance().
  void set_instance(std::uint64_t instance) {
    group_number_ = group_number(options_.members.ranks, instance);
  }

  /// Issues an operation. `done` gets the gate of the result, or the failure.
  void submit(std::unique_ptr<DeviceOperation> operation, const std::vector<at::Tensor>& tensors,
              UniqueFunction<void(std::shared_ptr<const ValueGate>, std::exception_ptr)> done);
  /// Within the launch of an operation: waits until the stream has done what was enqueued. Throws if the group fails, or
  /// kTimedOut after its timeout.
  void wait_for_stream();
  /// Fails everything, here and on the ranks that the control group reaches.
  void break_with(const Error& cause);

  void member_died(const rendezvous::Member& member, const Error& reason) override;
  /// Later operations fail, and those that do not end soon; see kLeftLimit.
  void member_left(const rendezvous::Member&) override {}
  /// The control group reports it to the other ranks.
  void world_ended(const Error& reason) override { fail_pending(reason); }
  void world_closing() override { stop_thread(); }

 private:
  class QueueExecutor;
  struct Job;

  DeviceQueue(std::shared_ptr<Backend> control, std::unique_ptr<DeviceEngine> engine,
              std::shared_ptr<GroupFailure> failure, DeviceQueueOptions options);
  void fail_pending(const Error& cause);
  void run();
  std::unique_ptr<Job> take();
  void run_one(std::unique_ptr<Job> job);
  CallNumbers agree(Job& job);
  void launch(Job& job);
  /// Monitors launched work; true if there is any.
  bool watch();
  void finish();
  void stop_thread();
  static void fail(Job& job, const Error& cause);

  const std::shared_ptr<Backend> control_;
  const std::unique_ptr<DeviceEngine> engine_;
  const std::shared_ptr<GroupFailure> failure_;
  const DeviceQueueOptions options_;
  std::atomic<std::int32_t> group_number_{group_number(options_.members.ranks)};
  Runtime& runtime_;
  const c10::Stream stream_;
  std::shared_ptr<QueueExecutor> continuations_;
  const std::shared_ptr<ContinuationExecutor> promised_continuations_;
  const std::unique_ptr<Parker> parker_;
  std::atomic<bool> stopping_{false};
  LaunchedWork launched_;  ///< of the queue's thread
  Mutex mutex_;
  std::deque<std::unique_ptr<Job>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t called_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Thread thread_;
};

}  // namespace torchspan::collective
