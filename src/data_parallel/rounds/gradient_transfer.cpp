#include "data_parallel/rounds/gradient_transfer.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

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
    : slots_(slots), buckets_(std::move(buckets)), in_place_(in_place), shared_(slots.size()) {}

void GradientTransfer::put(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient,
                           const PutOptions& options) {
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = slots_.tensor(slot);
  shared_[slot] = options.shared ? 1 : 0;
  try {
    if (options.shared && buckets_->holds(slot, gradient)) sink.replace(parameter, gradient.clone());
    const bool was_there = buckets_->put(slot, gradient, options.factor);
    const bool sparse = buckets_->sparse(buckets_->bucket_of(slot));
    if (is_view(slot) && gradient.defined() && !was_there && !sparse)
      sink.replace(parameter, buckets_->view(slot));
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("parameter '{}': {}", slots_.name(slot), error.message()));
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
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    if (status.used(slot % slots_.count())) write_slot(sink, slot);
  }
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

void GradientTransfer::write_slot(engine::GradientSink& sink, std::size_t slot) const {
  const at::Tensor& parameter = slots_.tensor(slot);
  const at::Tensor& view = buckets_->view(slot);
  const at::Tensor gradient = sink.gradient(parameter);
  if (buckets_->sparse(buckets_->bucket_of(slot))) {
    sink.replace(parameter, view);
  } else if (is_view(slot)) {
    if (!buckets_->holds(slot, gradient)) sink.replace(parameter, view);
  } else if (sink.writes_grad_field() && gradient.defined()) {
    gradient.copy_(view);
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
