#include "collective/point_to_point/point_to_point.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/detail/device/streams.h>

#include "collective/api/event_gate.h"
#include "collective/serial/serial_backend.h"
#include "collective/tensors.h"

namespace torchspan::collective {
namespace {

std::string contents_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes().vec(), ", "));
}

/// Memory into which the tensor's contents are received.
at::Tensor memory_for(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return tensor.detach();
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()));
}

at::Tensor& tensor_of(at::Tensor& received) { return received; }
at::Tensor& tensor_of(ReceivedMessage& received) { return received.tensor; }

/// Receives a tensor on a device through memory of the CPU. The copy to the device runs after the work that the caller has
/// enqueued so far, and takers' work after the copy.
template <class Received, class F>
Future<Received> through_cpu(const std::shared_ptr<GroupExecutor>& continuations,
                             const device::EventPoolPtr& events, const at::Tensor& tensor, F receive) {
  const auto before = EventGate::record(device::current_stream(tensor.device()), events, {tensor});
  const auto promise = std::make_shared<Promise<Received>>(continuations);
  Future<Received> future = promise->future();
  receive(at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type())))
      .add_done_callback([promise, events, before, tensor](const Future<Received>& done) {
        try {
          Received received = done.wait();
          before->pass();
          put_back(tensor_of(received), tensor);
          tensor_of(received) = tensor;
          promise->set_value_behind(
              EventGate::record(device::current_stream(tensor.device()), events, {tensor}),
              std::move(received));
        } catch (...) {
          promise->set_error(std::current_exception());
        }
      });
  return future;
}

}  // namespace

PointToPoint::PointToPoint(PairPlan plan, std::shared_ptr<Backend> backend)
    : continuations_(std::make_shared<GroupExecutor>(plan.world->runtime())),
      loop_(std::move(plan), std::move(backend)) {}

std::shared_ptr<PointToPoint> PointToPoint::make(PairPlan plan, std::shared_ptr<Backend> backend) {
  const std::shared_ptr<WorldLink> world = plan.world;
  const std::shared_ptr<PointToPoint> messages(new PointToPoint(std::move(plan), std::move(backend)));
  world->add(messages);
  return messages;
}

PointToPoint::~PointToPoint() {
  loop_.stop(Error(ErrorKind::kCancelled,
                   "the last handle of the group was dropped while this operation was pending"));
  GroupExecutor::close(std::move(continuations_), loop_.plan().world->ended().has_value());
}

std::shared_ptr<PointToPoint> PointToPoint::of_part(std::shared_ptr<Backend> part, std::uint64_t split) {
  constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ULL;
  const PairPlan& whole = loop_.plan();
  if (part->size() == 1) return nullptr;
  PairPlan plan{.world = whole.world,
                .members = whole.members.part(part->ranks()),
                .rank = part->rank(),
                .group = (whole.group + split) * kOdd,
                .timeout = whole.timeout};
  return make(std::move(plan), std::move(part));
}

void PointToPoint::submit(MessageOperation operation) {
  const auto shared = std::make_shared<MessageOperation>(std::move(operation));
  Executor& executor = loop_.plan().world->runtime()->executor;
  shared->contents = contents_of(shared->tensor);
  shared->began = executor.now();
  shared->deadline = executor.deadline_in(loop_.plan().timeout);
  loop_.add(shared);
}

Future<at::Tensor> PointToPoint::send(const at::Tensor& tensor, int peer, int tag) {
  const at::NoGradGuard no_grad;
  const auto promise = std::make_shared<Promise<at::Tensor>>(continuations_);
  submit({.sends = true,
          .peer = peer,
          .tag = tag,
          .tensor = tensor,
          .work = plain(tensor.is_cpu() ? tensor : tensor.detach().to(at::kCPU)),
          .promise = promise});
  return promise->future();
}

Future<at::Tensor> PointToPoint::recv(const at::Tensor& tensor, int peer, int tag) {
  if (!tensor.is_cpu()) {
    return through_cpu<at::Tensor>(continuations_, events_, tensor,
                                   [&](const at::Tensor& staging) { return recv(staging, peer, tag); });
  }
  const at::NoGradGuard no_grad;
  const auto promise = std::make_shared<Promise<at::Tensor>>(continuations_);
  submit({.peer = peer, .tag = tag, .tensor = tensor, .work = memory_for(tensor), .promise = promise});
  return promise->future();
}

Future<ReceivedMessage> PointToPoint::recv_from_any(const at::Tensor& tensor, int tag) {
  if (!tensor.is_cpu()) {
    return through_cpu<ReceivedMessage>(continuations_, events_, tensor, [&](const at::Tensor& staging) {
      return recv_from_any(staging, tag);
    });
  }
  const at::NoGradGuard no_grad;
  const auto promise = std::make_shared<Promise<ReceivedMessage>>(continuations_);
  submit({.from_any = true,
          .tag = tag,
          .tensor = tensor,
          .work = memory_for(tensor),
          .promise_from_any = promise});
  return promise->future();
}

void PointToPoint::member_died(const rendezvous::Member& member, const Error& reason) {
  if (!loop_.plan().members.contains(member)) return;
  loop_.break_with(departed_rank_error(describe(member), reason.message()), MessageLoop::Tell::kNobody);
}

void PointToPoint::world_ended(const Error& reason) { loop_.break_with(reason, MessageLoop::Tell::kPeers); }

void PointToPoint::world_closing() {
  loop_.stop(Error(ErrorKind::kCancelled, "the world of this group has ended"));
}

}  // namespace torchspan::collective
