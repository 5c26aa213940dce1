#include "autograd/messages/messages.h"

#include <cstring>
#include <fmt/format.h>

#include <torchspan/optim/algorithms.h>

#include "checkpoint/remote_values.h"
#include "optim/distributed/messages.h"
#include "pipeline/messages/messages.h"
#include "quorum/messages.h"
#include "rpc/calls/autocast_header.h"
#include "rpc/device_memory/messages.h"
#include "rpc/peers/peer_channels.h"
#include "rpc/references/control.h"
#include "rpc/tensor_parts/messages.h"
#include "tests/wire_versions/example.h"
#include "tests/wire_versions/fixtures.h"
#include "wire/api/tensors.h"

namespace torchspan::wire_versions::message_bytes {
namespace {

Bytes copy_of(const Segment& segment) {
  const auto* data = static_cast<const std::byte*>(segment.data);
  return Bytes(data, data + segment.size);
}

/// The frame of a payload, and the segments of its tensors.
Parts to_parts(wire::FrameHeader header, const wire::Payload& payload) {
  wire::Frame frame;
  frame.header = header;
  for (std::size_t i = 0; i < payload.references.size(); ++i) {
    const auto number = static_cast<std::uint32_t>(i);
    frame.handles.push_back({number + 1, {number + 2, 3}, {number + 4, 5}, 0x1122334455667788, 6});
  }
  frame.value = payload.value;
  const wire::PackedTensors tensors = wire::pack(payload.tensors);
  frame.tensor_metadata = tensors.metadata;
  Parts parts{wire::encode_frame(frame)};
  for (const Segment& segment : tensors.segments) parts.push_back(copy_of(segment));
  return parts;
}

wire::Payload to_payload(const wire::FrameView& frame, const Parts& parts) {
  wire::Payload payload;
  payload.value.assign(frame.value.begin(), frame.value.end());
  payload.references.resize(frame.handles.size());
  std::vector<Buffer> segments;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    segments.push_back(allocate_buffer(parts[i].size()));
    std::memcpy(segments.back().data, parts[i].data(), parts[i].size());
  }
  payload.tensors = wire::unpack(frame.tensor_metadata, segments);
  return payload;
}

template <class T>
Parts rewrite(const Parts& parts) {
  const wire::FrameView frame = wire::decode_frame(parts.at(0), {kFilesVersion, kFilesVersion, 0});
  wire::Payload payload = to_payload(frame, parts);
  return to_parts(frame.header, wire::to_payload(wire::from_payload<T>(payload)));
}

template <class T>
Fixture fixture_of(std::string key, wire::MessageType type, std::uint32_t flags) {
  wire::FrameHeader header{.version = kFilesVersion,
                           .type = type,
                           .flags = flags,
                           .features = 0,
                           .instance = 0x0102030405060708,
                           .sequence = 9,
                           .call = 10,
                           .remaining = 11};
  Examples examples;
  return {std::move(key), to_parts(header, wire::to_payload(examples.next<T>())), rewrite<T>};
}

/// A message and its reply, or a struct that messages carry.
template <class T>
void add(Fixtures& fixtures, const std::string& key) {
  if constexpr (requires { T::kType; }) {
    fixtures.push_back(fixture_of<T>(key, T::kType, wire::kFlagHasDeadline));
  } else {
    fixtures.push_back(fixture_of<T>(key, {}, 0));
  }
  if constexpr (requires { typename T::Reply; })
    fixtures.push_back(fixture_of<typename T::Reply>(key + "/reply", T::kType, wire::kFlagReply));
}

template <class... Ts>
void add_all(Fixtures& fixtures, const std::string& room) {
  // The name of the struct is that of its wire name without the room.
  const auto name_of = [](std::string name) {
    name.resize(name.find('{'));
    const std::size_t dot = name.rfind('.');
    return dot == std::string::npos ? name : name.substr(dot + 1);
  };
  (add<Ts>(fixtures, room + "/" + name_of(wire::type_name<Ts>())), ...);
}

}  // namespace

Fixtures fixtures() {
  Fixtures all;
  {
    using namespace rpc;  // NOLINT(google-build-using-namespace)
    add_all<Hello, ForkRequest, ChildAccept, UserDelete, ForkAudit, CreationGivenUp, OfferDeviceMemory,
            ReleaseDeviceMemory, TensorPart, AutocastHeader, AutocastMode, OfferAnswer, SharedPlace,
            SharedPlaces, SplitPlace, SplitPlaces, WorkerInfo>(all, "rpc");
  }
  {
    using namespace autograd;  // NOLINT(google-build-using-namespace)
    add_all<PropagateGradients, AbortPass, ReleaseContext, MarkSends, MarksFinal, AskPass, AskGraph,
            AdoptMember, ClearGradients, ClearedPart, EdgeHeader, GraphPart, MarkedSend, MarkedWorkers,
            PartOver, PartReport, WaitingSend, WorkerGraph>(all, "autograd");
  }
  {
    using namespace optim;  // NOLINT(google-build-using-namespace)
    add_all<CreateOptimizer, StepOptimizer, DropOptimizer, NormOfGradients, ReadState, WriteState, KeepState,
            TakeState, StepInBackward, Adadelta, Adagrad, Adam, AdamW, Adamax, GradientNorm, OptimizerGroup,
            OptimizerTarget, RMSprop, Rprop, SGD, SparseAdam>(all, "optim");
  }
  {
    using namespace pipeline;  // NOLINT(google-build-using-namespace)
    add_all<StepBegin, Activations, Gradients, StepFailed, PartDone, StepClosed, Credit, AskState,
            TiedGradient, ReplicaGradients, ReplicaStatistics, ReplicaDone, ReplicaBegin, StepId, WorkerState,
            AskInitialValues>(all, "pipeline");
  }
  // Two structs have older names on the wire.
  add<optim::OptimizerSpec>(all, "optim/OptimizerSpec");
  add<pipeline::RanAction>(all, "pipeline/RanAction");
  {
    using namespace checkpoint;  // NOLINT(google-build-using-namespace)
    add_all<ListTensors, TakeSnapshot, WriteSnapshot, DropSnapshot, LoadTensors, RemoteItem>(all,
                                                                                             "checkpoint");
  }
  {
    using namespace quorum;  // NOLINT(google-build-using-namespace)
    add_all<AwaitGeneration, Withdraw, AskAwaited, Generation, GenerationAnswer, Report>(all, "quorum");
  }
  return all;
}

}  // namespace torchspan::wire_versions::message_bytes
