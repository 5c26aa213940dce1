#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/rpc/message.h>
#include <torchspan/pipeline/batch.h>
#include <torchspan/schedule.h>
#include <torchspan/wire.h>

namespace torchspan::pipeline {

/// The step of one pipeline that a message belongs to.
struct StepId {
  static constexpr FixedString kWireName = "pipeline.StepId";
  std::uint64_t pipeline = 0;
  std::uint64_t step = 0;
};

/// What a step computes.
enum class StepKind : std::uint8_t {
  kTrain = 1,  ///< forwards, loss, backwards
  kLoss,       ///< the same without gradients: no backwards
  kInfer,      ///< forwards only
  kForward,    ///< forwards; a separate call runs the backwards
};

/// The call that begins such a step, for messages.
inline const char* call_of(StepKind kind) {
  switch (kind) {
    case StepKind::kTrain:
      return "train_step()";
    case StepKind::kLoss:
      return "train_step() without gradients";
    case StepKind::kInfer:
      return "infer()";
    case StepKind::kForward:
      return "forward()";
  }
  return "an unknown call";
}

/// Whether passes of such a step have a backward.
inline bool has_backwards(StepKind kind) { return kind == StepKind::kTrain || kind == StepKind::kForward; }

/// Begins a step; from the first worker, which splits the batch.
struct StepBegin {
  static constexpr wire::MessageType kType{0x0301};
  static constexpr std::string_view kName = "pipeline.begin";
  using Reply = Unit;
  StepId id;
  StepKind kind = StepKind::kTrain;
  std::vector<std::int64_t> rows;  ///< by micro-batch
  double gradient_scale = 1;
  std::int64_t cache = -1;        ///< number of the Cache of infer(); -1: none
  std::uint64_t random_step = 0;  ///< the step in seed_of_use()
  bool no_sync = false;           ///< StepOptions::no_sync
  TimePoint arrived = {};         ///< on this worker; not sent
  bool carries = false;           ///< `.grad` has gradients of steps with no_sync; not sent
};

/// Takes the place of a link's index for the pipeline's own input and output.
inline constexpr int kOutside = -1;

/// The batch that a link transfers, and which of its members need a gradient.
struct Activation : Batch {
  std::vector<std::uint8_t> wants_gradient;  ///< by member

  bool wants_any() const {
    return std::any_of(wants_gradient.begin(), wants_gradient.end(),
                       [](std::uint8_t wants) { return wants != 0; });
  }
};

/// The activations of one micro-batch that a link carries forward.
struct Activations : Activation {
  static constexpr wire::MessageType kType{0x0302};
  static constexpr std::string_view kName = "pipeline.activations";
  using Reply = Unit;
  StepId id;
  std::int32_t micro_batch = 0;
  std::int32_t link = 0;
  rpc::DevicePlace place = {};  ///< not sent
};

/// The gradients that a link carries back: one tensor per member, undefined where there is none. Sent if any
/// member wants one.
struct Gradients {
  static constexpr wire::MessageType kType{0x0303};
  static constexpr std::string_view kName = "pipeline.gradients";
  using Reply = Unit;
  StepId id;
  std::int32_t micro_batch = 0;
  std::int32_t link = 0;
  std::vector<at::Tensor> gradients;
  rpc::DevicePlace place = {};  ///< not sent
};

/// Ends the step on all workers, because it failed on the sender.
struct StepFailed {
  static constexpr wire::MessageType kType{0x0304};
  static constexpr std::string_view kName = "pipeline.failed";
  using Reply = Unit;
  StepId id;
  Error error{ErrorKind::kCancelled, ""};
};

/// An executed action; times in nanoseconds from the step's start.
struct RanAction {
  static constexpr FixedString kWireName = "pipeline.RanAction";
  schedule::ActionKind kind = schedule::ActionKind::kForward;
  std::int32_t layer_range = 0;
  std::int32_t micro_batch = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::int32_t live = 0;  ///< passes whose activations the worker holds after it
};

/// The sender has run its part of the step; to the first worker.
struct PartDone {
  static constexpr wire::MessageType kType{0x0305};
  static constexpr std::string_view kName = "pipeline.done";
  static constexpr FixedString kWireName = "pipeline.PartDone";
  using Reply = Unit;
  StepId id;
  std::int32_t worker = 0;  ///< index in the plan
  double loss = 0;
  std::int32_t peak = 0;
  std::vector<RanAction> actions;
};

/// All workers have run their part of the step; from the first worker.
struct StepClosed {
  static constexpr wire::MessageType kType{0x0306};
  static constexpr std::string_view kName = "pipeline.closed";
  static constexpr FixedString kWireName = "pipeline.StepClosed";
  using Reply = Unit;
  StepId id;
  double loss = 0;
  std::vector<std::int32_t> peaks;              ///< by worker
  std::vector<std::vector<RanAction>> actions;  ///< by worker
};

/// A micro-batch left the pipeline without a backward; the first worker may start another one.
struct Credit {
  static constexpr wire::MessageType kType{0x0307};
  static constexpr std::string_view kName = "pipeline.credit";
  static constexpr FixedString kWireName = "pipeline.Credit";
  using Reply = Unit;
  StepId id;
  std::int32_t micro_batch = 0;
};

/// The sum of a worker's gradients of a tied parameter; from the first worker of the tie, the sum of all.
struct TiedGradient {
  static constexpr wire::MessageType kType{0x0309};
  static constexpr std::string_view kName = "pipeline.tied";
  using Reply = Unit;
  StepId id;
  std::int32_t tie = 0;         ///< index among the declared ties
  std::int32_t worker = 0;      ///< the sender's index in the plan
  at::Tensor gradient;          ///< may be undefined
  rpc::DevicePlace place = {};  ///< not sent
};

/// Gradients of one bucket from another replica of the stage: those that the receiver sums, or, from the replica that
/// sums them, the result.
struct ReplicaGradients {
  static constexpr wire::MessageType kType{0x030A};
  static constexpr std::string_view kName = "pipeline.replica_gradients";
  using Reply = Unit;
  StepId id;
  std::int32_t bucket = 0;
  std::int32_t replica = 0;           ///< of the sender
  std::int64_t rows = 0;              ///< of the sender's batch, which weigh its gradients
  std::vector<at::Tensor> gradients;  ///< by parameter of the bucket; may be undefined
  rpc::DevicePlace place = {};        ///< not sent
};

/// What modules of the stage gathered in this step in another replica, such as moments of batch norms.
struct ReplicaStatistics {
  static constexpr wire::MessageType kType{0x030B};
  static constexpr std::string_view kName = "pipeline.replica_statistics";
  static constexpr FixedString kWireName = "pipeline.ReplicaStatistics";
  using Reply = Unit;
  StepId id;
  std::int32_t replica = 0;                       ///< of the sender
  std::vector<std::vector<at::Tensor>> gathered;  ///< by module
};

/// All workers of a replica have run a part of the step; from its first worker to those of the other replicas.
struct ReplicaDone {
  static constexpr wire::MessageType kType{0x030C};
  static constexpr std::string_view kName = "pipeline.replica_done";
  static constexpr FixedString kWireName = "pipeline.ReplicaDone";
  using Reply = Unit;
  StepId id;
  std::int32_t replica = 0;  ///< of the sender
  std::int32_t part = 0;     ///< 1: the backwards of a StepKind::kForward
  std::int64_t rows = 0;
  double loss = 0;  ///< of the replica's batch
};

/// A replica begins a step; from its first worker to all workers of the other replicas, which compare it with theirs.
struct ReplicaBegin {
  static constexpr wire::MessageType kType{0x030D};
  static constexpr std::string_view kName = "pipeline.replica_begin";
  static constexpr FixedString kWireName = "pipeline.ReplicaBegin";
  using Reply = Unit;
  StepId id;
  std::int32_t replica = 0;  ///< of the sender
  StepKind kind = StepKind::kTrain;
  std::int64_t rows = 0;  ///< of the replica's batch
  double gradient_scale = 1;
  bool no_sync = false;
};

/// What a worker of the pipeline does now.
struct WorkerState {
  static constexpr FixedString kWireName = "pipeline.WorkerState";
  std::uint64_t step = 0;  ///< the current step, or the last one
  bool in_step = false;
  bool busy = false;   ///< runs an action; does not wait for other workers
  std::string doing;   ///< the action
  double seconds = 0;  ///< duration of this state
};

/// Asks for the state of a worker; from one that waits for it.
struct AskState {
  static constexpr wire::MessageType kType{0x0308};
  static constexpr std::string_view kName = "pipeline.state";
  static constexpr FixedString kWireName = "pipeline.AskState";
  using Reply = WorkerState;
  StepId id;
};

/// Asks a worker for values with which copies of its tensors begin, while the pipeline is created. Release 0.1.0 does not
/// know it; its workers and later ones refuse a pipeline that needs it (fingerprint() in handshake.cpp).
struct AskInitialValues {
  static constexpr wire::MessageType kType{0x030E};
  static constexpr std::string_view kName = "pipeline.initial_values";
  static constexpr FixedString kWireName = "pipeline.AskInitialValues";
  using Reply = std::vector<at::Tensor>;
  StepId id;                        ///< of no step
  std::vector<std::int32_t> which;  ///< indices into what the worker offers (EventQueue::offer())
};

}  // namespace torchspan::pipeline

namespace torchspan {
template <>
struct Wire<pipeline::StepBegin>
    : WireStruct<pipeline::StepBegin, "pipeline.StepBegin", &pipeline::StepBegin::id,
                 &pipeline::StepBegin::kind, &pipeline::StepBegin::rows, &pipeline::StepBegin::gradient_scale,
                 &pipeline::StepBegin::cache, &pipeline::StepBegin::random_step,
                 &pipeline::StepBegin::no_sync> {};
template <>
struct Wire<pipeline::Activations>
    : WireStruct<pipeline::Activations, "pipeline.Activations", &pipeline::Activations::id,
                 &pipeline::Activations::micro_batch, &pipeline::Activations::link,
                 &pipeline::Activations::tuple, &pipeline::Activations::members,
                 &pipeline::Activations::wants_gradient, &pipeline::Activations::unsplit> {};
template <>
struct Wire<pipeline::Gradients> : WireStruct<pipeline::Gradients, "pipeline.Gradients",
                                              &pipeline::Gradients::id, &pipeline::Gradients::micro_batch,
                                              &pipeline::Gradients::link, &pipeline::Gradients::gradients> {};
template <>
struct Wire<pipeline::StepFailed> : WireStruct<pipeline::StepFailed, "pipeline.StepFailed",
                                               &pipeline::StepFailed::id, &pipeline::StepFailed::error> {};
template <>
struct Wire<pipeline::TiedGradient>
    : WireStruct<pipeline::TiedGradient, "pipeline.TiedGradient", &pipeline::TiedGradient::id,
                 &pipeline::TiedGradient::tie, &pipeline::TiedGradient::worker,
                 &pipeline::TiedGradient::gradient> {};
template <>
struct Wire<pipeline::ReplicaGradients>
    : WireStruct<pipeline::ReplicaGradients, "pipeline.ReplicaGradients", &pipeline::ReplicaGradients::id,
                 &pipeline::ReplicaGradients::bucket, &pipeline::ReplicaGradients::replica,
                 &pipeline::ReplicaGradients::rows, &pipeline::ReplicaGradients::gradients> {};
}  // namespace torchspan
