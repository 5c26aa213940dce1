#include "data_parallel/rounds/gradient_transfer.h"

#include <algorithm>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/device/streams.h>

#include "device/api/compat.h"

namespace torchspan::data_parallel {

void move_out_of_buckets(const ParameterSlots& slots, const Buckets& buckets, engine::GradientSink& sink,
                         bool keep_values) {
  const at::NoGradGuard no_grad;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const at::Tensor gradient = sink.gradient(slots.tensor(slot));
    if (!buckets.holds(slot, gradient)) continue;
    sink.replace(slots.tensor(slot), keep_values ? gradient.clone() : at::zeros_like(buckets.view(slot)));
  }
}

GradientTransfer::GradientTransfer(const ParameterSlots& slots, std::shared_ptr<Buckets> buckets,
                                   bool in_place)
    : slots_(slots),
      buckets_(std::move(buckets)),
      in_place_(in_place),
      shared_(slots.size()),
      delayed_(buckets_->size()) {}

void GradientTransfer::put(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient,
                           const PutOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = slots_.tensor(slot);
  shared_[slot] = options.shared ? 1 : 0;
  try {
    if (delay(slot, gradient, options)) return;
    if (options.shared && buckets_->holds(slot, gradient)) sink.replace(parameter, gradient.clone());
    const bool was_there = buckets_->put(slot, gradient, options.factor);
    const bool sparse = buckets_->sparse(buckets_->bucket_of(slot));
    if (is_view(slot) && gradient.defined() && !was_there && !sparse)
      sink.replace(parameter, buckets_->view(slot));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("parameter '{}': {}", slots_.name(slot), error.message()));
  }
}

/// One operation for each gradient would cost a device more than the copy.
bool GradientTransfer::delay(std::size_t slot, const at::Tensor& gradient, const PutOptions& options) {
  if (!gradient.defined() || options.shared || !device::has_streams(gradient.device())) return false;
  const std::size_t bucket = buckets_->bucket_of(slot);
  if (buckets_->sparse(bucket) || buckets_->holds(slot, gradient)) return false;
  buckets_->check(slot, gradient);
  if (gradient.numel() == 0 || gradient.device() != buckets_->view(slot).device()) return false;
  const c10::Stream stream = device::current_stream(gradient.device());
  MutexLock lock(mutex_);
  auto& all = delayed_[bucket];
  auto same = std::find_if(all.begin(), all.end(), [&](const Delayed& one) { return one.stream == stream; });
  if (same == all.end()) same = all.insert(all.end(), Delayed{stream, options.factor, {}, {}});
  same->slots.push_back(slot);
  same->gradients.push_back(gradient);
  return true;
}

void GradientTransfer::complete(engine::GradientSink& sink, std::size_t bucket) {
  std::vector<Delayed> all;
  {
    MutexLock lock(mutex_);
    all.swap(delayed_[bucket]);
  }
  const at::NoGradGuard no_grad;
  for (const Delayed& delayed : all) {
    const c10::StreamGuard on_stream(delayed.stream);
    std::vector<at::Tensor> views;
    for (const std::size_t slot : delayed.slots) views.push_back(buckets_->view(slot));
    device::compat::copy_all(views, delayed.gradients);
    if (delayed.factor != 1) at::_foreach_mul_(views, at::Scalar(delayed.factor));
    for (const std::size_t slot : delayed.slots) {
      if (is_view(slot)) sink.replace(slots_.tensor(slot), buckets_->view(slot));
    }
  }
}

void GradientTransfer::keep(std::size_t slot, const at::Tensor& gradient) {
  if (!in_place_ || !gradient.defined() || gradient.is_sparse()) return;
  at::Tensor kept = buckets_->holds(slot, gradient) ? gradient.clone() : gradient;
  MutexLock lock(mutex_);
  kept_.emplace_back(slot, std::move(kept));
}

void GradientTransfer::leave_buckets(engine::GradientSink& sink) const {
  if (in_place_) move_out_of_buckets(slots_, *buckets_, sink, /*keep_values=*/false);
}

void GradientTransfer::write_back(engine::GradientSink& sink, const StatusExchange& status) const {
  const at::NoGradGuard no_grad;
  std::vector<Copies> copies(buckets_->size());
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (status.used(slot % slots_.count())) write_slot(sink, slot, copies[buckets_->bucket_of(slot)]);
  }
  for (Copies& bucket : copies) device::compat::copy_all(bucket.to, bucket.from);
  std::vector<std::pair<std::size_t, at::Tensor>> kept;
  {
    MutexLock lock(mutex_);
    kept = kept_;
  }
  for (const auto& [slot, gradient] : kept) {
    if (status.used(slot % slots_.count()) || !is_view(slot)) continue;
    const at::Tensor& view = buckets_->view(slot);
    view.copy_(gradient);
    sink.replace(slots_.tensor(slot), view);
  }
}

void GradientTransfer::write_slot(engine::GradientSink& sink, std::size_t slot, Copies& copies) const {
  const at::Tensor& parameter = slots_.tensor(slot);
  const at::Tensor& view = buckets_->view(slot);
  const at::Tensor gradient = sink.gradient(parameter);
  if (buckets_->sparse(buckets_->bucket_of(slot))) {
    sink.replace(parameter, view);
  } else if (is_view(slot)) {
    if (!buckets_->holds(slot, gradient)) sink.replace(parameter, view);
  } else if (sink.writes_grad_field() && gradient.defined()) {
    copies.to.push_back(gradient);
    copies.from.push_back(view);
  } else {
    sink.replace(parameter, view.clone());
  }
}

void GradientTransfer::move_to(Buckets& rebuilt, engine::GradientSink& sink) const {
  const at::NoGradGuard no_grad;
  for (std::size_t slot = 0; in_place_ && slot < slots_.size(); ++slot) {
    const at::Tensor gradient = sink.gradient(slots_.tensor(slot));
    if (!buckets_->holds(slot, gradient)) continue;
    rebuilt.put(slot, gradient, 1);
    sink.replace(slots_.tensor(slot), rebuilt.view(slot));
  }
}

}  // namespace torchspan::data_parallel
