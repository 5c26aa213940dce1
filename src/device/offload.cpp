#include "device/api/offload.h"

#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include "device/api/tensors.h"

namespace torchspan::device {
namespace {

/// Tensors whose copies to the host have not been waited for.
constexpr std::size_t kMostPending = 2;

}  // namespace

/// The streams, the device tensors whose copies may not be complete, and host memory that a device still reads.
class Offloader::Copies {
 public:
  ~Copies() {
    for (const Returning& each : returning_) each.done.wait();
  }

  c10::Stream out(c10::Device device) { return stream(device, 0); }
  c10::Stream in(c10::Device device) { return stream(device, 1); }
  const EventPoolPtr& events() const { return events_; }

  /// Keeps the device tensor until its copy, of which `done` is the end, is complete.
  void add_pending(const void* owner, at::Tensor tensor, Mark done) {
    pending_.push_back({owner, std::move(tensor), std::move(done)});
    while (pending_.size() > kMostPending) {
      pending_.front().done.wait();
      pending_.pop_front();
    }
  }
  /// Returns the device tensor if it is still there; it is then no longer pending.
  at::Tensor take_pending(const void* owner) {
    for (auto each = pending_.begin(); each != pending_.end(); ++each) {
      if (each->owner != owner) continue;
      at::Tensor tensor = std::move(each->tensor);
      pending_.erase(each);
      return tensor;
    }
    return {};
  }
  /// Keeps host memory that a device reads until `done`.
  void add_returning(at::Tensor host, Mark done) {
    for (auto each = returning_.begin(); each != returning_.end();)
      each = each->done.reached() ? returning_.erase(each) : std::next(each);
    returning_.push_back({std::move(host), std::move(done)});
  }

 private:
  struct Pending {
    const void* owner;
    at::Tensor tensor;
    Mark done;
  };
  struct Returning {
    at::Tensor host;
    Mark done;
  };
  c10::Stream stream(c10::Device device, int direction) {
    const std::pair key{device.str(), direction};
    const auto found = streams_.find(key);
    if (found != streams_.end()) return found->second;
    return streams_.emplace(key, stream_from_pool(device, /*high_priority=*/true)).first->second;
  }

  const EventPoolPtr events_ = std::make_shared<EventPool>();
  std::map<std::pair<std::string, int>, c10::Stream> streams_;
  std::list<Pending> pending_;
  std::list<Returning> returning_;
};

struct OffloadedTensor::State {
  std::shared_ptr<Offloader::Copies> copies;
  c10::Device device;
  c10::Stream made;  ///< the stream that was current at offload()
  at::Tensor host;
  std::optional<Mark> stored = {};    ///< the end of the copy to the host
  at::Tensor back = {};               ///< the tensor on its device again, from prefetch() on
  std::optional<Mark> returned = {};  ///< the end of the copy to it
};

OffloadedTensor::OffloadedTensor(std::unique_ptr<State> state) : state_(std::move(state)) {}
OffloadedTensor::OffloadedTensor(OffloadedTensor&&) noexcept = default;

OffloadedTensor::~OffloadedTensor() {
  if (!state_) return;
  state_->copies->take_pending(state_.get());
  if (state_->stored) state_->stored->wait();
  if (state_->returned) state_->returned->wait();
}

void OffloadedTensor::prefetch() {
  State& state = *state_;
  if (state.back.defined()) return;
  state.back = state.copies->take_pending(&state);
  if (state.back.defined()) return;
  // The host has waited for the copy of a tensor that is no longer pending.
  const at::NoGradGuard no_grad;
  const c10::Stream in = state.copies->in(state.device);
  StreamsScope scope;
  scope.enter(in);
  state.back =
      at::empty_strided(state.host.sizes(), state.host.strides(), state.host.options().device(state.device));
  state.back.copy_(state.host, /*non_blocking=*/true);
  state.returned.emplace(in, state.copies->events());
}

at::Tensor OffloadedTensor::take() {
  prefetch();
  const std::unique_ptr<State> state = std::move(state_);
  const c10::Stream here = current_stream(state->device);
  if (state->returned) {
    state->returned->hold_back(here);
    keep_memory_for(state->back, here);
    state->copies->add_returning(std::move(state->host), std::move(*state->returned));
  } else {
    order_after(here, state->made, *state->copies->events());
    keep_memory_for(state->back, here);
    state->copies->add_returning(std::move(state->host), std::move(*state->stored));
  }
  return std::move(state->back);
}

Offloader::Offloader() : copies_(std::make_shared<Copies>()) {}
Offloader::~Offloader() = default;

OffloadedTensor Offloader::offload(at::Tensor tensor) {
  const at::NoGradGuard no_grad;
  // A copy that is not complete would be conjugated or negated on the host too early.
  tensor = tensor.resolve_conj().resolve_neg();
  const c10::Device device = tensor.device();
  const c10::Stream out = copies_->out(device);
  auto state = std::make_unique<OffloadedTensor::State>(OffloadedTensor::State{
      copies_, device, current_stream(device),
      at::empty_strided(tensor.sizes(), dense_strides_like(tensor),
                        at::TensorOptions().dtype(tensor.dtype()).pinned_memory(device.is_cuda()))});
  order_after(out, current_stream(device), *copies_->events());
  {
    StreamsScope scope;
    scope.enter(out);
    state->host.copy_(tensor, /*non_blocking=*/true);
  }
  state->stored.emplace(out, copies_->events());
  keep_memory_for(tensor, out);
  copies_->add_pending(state.get(), std::move(tensor), Mark(out, copies_->events()));
  return OffloadedTensor(std::move(state));
}

}  // namespace torchspan::device
