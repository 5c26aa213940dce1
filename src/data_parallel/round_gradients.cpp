#include "data_parallel/round_gradients.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/device/streams.h>

#include "core/api/throw_invalid.h"
#include "device/api/compat.h"

namespace torchspan::data_parallel {
namespace {

/// Whether the group divides the sum. Half overflows if it is summed before it is divided.
bool group_averages(const ReducerContext& context, at::ScalarType dtype, double divisor) {
  return !context.comm_hook && divisor == context.group.size() && dtype != at::kHalf &&
         dtype != at::kComplexHalf;
}

std::string kind_of_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  const char* dtype = c10::toString(tensor.scalar_type());
  if (!tensor.is_sparse()) return fmt::format("{} elements of {}", tensor.numel(), dtype);
  return fmt::format("a sparse tensor [{}] of {}", fmt::join(tensor.sizes().vec(), ", "), dtype);
}

/// Throws Error{kInvalid} if a hook's result does not fit the bucket.
void check_result(const Buckets& buckets, std::size_t bucket, const at::Tensor& reduced) {
  const bool sparse = buckets.sparse(bucket);
  const at::Tensor& sent = sparse ? buckets.view(buckets.parameters(bucket)[0]) : buckets.buffer(bucket);
  if (reduced.defined() && reduced.is_sparse() == sparse && reduced.scalar_type() == sent.scalar_type() &&
      (sparse ? reduced.sizes() == sent.sizes() : reduced.numel() == sent.numel())) {
    return;
  }
  throw_invalid("the result of the communication hook for bucket {} is {}; it must be {}", bucket,
                kind_of_tensor(reduced), kind_of_tensor(sent));
}

}  // namespace

void move_out_of_buckets(const ReducerContext& context, const Buckets& buckets, engine::GradientSink& sink,
                         bool keep_values) {
  const at::NoGradGuard no_grad;
  const ParameterSlots& slots = context.slots;
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    const at::Tensor gradient = sink.gradient(slots.tensor(slot));
    if (!buckets.holds(slot, gradient)) continue;
    sink.replace(slots.tensor(slot), keep_values ? gradient.clone() : at::zeros_like(buckets.view(slot)));
  }
}

RoundGradients::RoundGradients(ReducerContext& context, std::uint64_t round, double divisor, bool in_place)
    : context_(context),
      round_(round),
      divisor_(divisor),
      in_place_(in_place),
      measured_(round <= 10 || round % 100 == 0 || context.runtime.spans.is_traced()),
      buckets_(context.buckets),
      works_(buckets_->size()),
      accepted_(context.slots.size()),
      order_(context.slots.count()),
      pending_(buckets_->size()),
      shared_(context.slots.size()),
      full_(buckets_->size()),
      producers_(buckets_->size()),
      delayed_(buckets_->size()) {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    pending_[bucket] = buckets_->parameters(bucket).size() * context.slots.replicas().size();
}

void RoundGradients::accept(std::size_t slot) {
  if (accepted_[slot].exchange(true)) {
    throw_invalid(
        "parameter '{}' got a second gradient in one step, after the first one was put into its bucket: it "
        "is used again in a backward pass inside the backward pass (checkpointing), or outside the wrapped "
        "forward, or in a backward pass over another output. If all steps have the same graph, set "
        "static_graph, which allows this",
        context_.slots.name(slot));
  }
  if (slot < order_.size()) order_[ordered_.fetch_add(1)].store(static_cast<std::uint32_t>(slot));
}

void RoundGradients::put(engine::GradientSink& sink, std::size_t slot, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const std::size_t bucket = buckets_->bucket_of(slot);
  const at::Tensor& parameter = context_.slots.tensor(slot);
  const bool shared = context_.hooks.is_shared(slot);
  shared_[slot] = shared ? 1 : 0;
  try {
    if (!delay(slot, gradient)) {
      if (shared && buckets_->holds(slot, gradient)) sink.replace(parameter, gradient.clone());
      const bool was_there = buckets_->put(slot, gradient, factor(bucket));
      if (is_view(slot) && gradient.defined() && !was_there && !buckets_->sparse(bucket))
        sink.replace(parameter, buckets_->view(slot));
    }
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("parameter '{}': {}", context_.slots.name(slot), error.message()));
  }
  note_arrival(bucket);
  if (pending_[bucket].fetch_sub(1) > 1) return;
  copy_bucket(sink, bucket);
  {
    MutexLock lock(context_.mutex);
    full_[bucket] = 1;
    producers_[bucket].record(context_.stream.events());
  }
  launch_full();
}

void RoundGradients::put_unused(engine::GradientSink& sink, std::size_t slot) {
  if (accepted_[slot].exchange(true)) return;
  const at::Tensor gradient = sink.gradient(context_.slots.tensor(slot));
  at::Tensor kept;
  if (in_place_ && gradient.defined() && !gradient.is_sparse())
    kept = buckets_->holds(slot, gradient) ? gradient.clone() : gradient;
  {
    MutexLock lock(context_.mutex);
    ++context_.stats.unused;
    if (kept.defined()) kept_.emplace_back(slot, std::move(kept));
  }
  put(sink, slot, gradient);
}

double RoundGradients::factor(std::size_t bucket) const {
  return context_.comm_hook || group_averages(context_, buckets_->dtype(bucket), divisor_) ? 1 : 1 / divisor_;
}

/// One operation for each gradient would cost a device more than the copy.
bool RoundGradients::delay(std::size_t slot, const at::Tensor& gradient) {
  if (!gradient.defined() || shared_[slot] != 0 || !device::has_streams(gradient.device())) return false;
  const std::size_t bucket = buckets_->bucket_of(slot);
  if (buckets_->sparse(bucket) || buckets_->holds(slot, gradient)) return false;
  buckets_->check(slot, gradient);
  if (gradient.numel() == 0 || gradient.device() != buckets_->view(slot).device()) return false;
  const c10::Stream stream = device::current_stream(gradient.device());
  MutexLock lock(context_.mutex);
  auto& all = delayed_[bucket];
  auto same = std::find_if(all.begin(), all.end(), [&](const Delayed& one) { return one.stream == stream; });
  if (same == all.end()) same = all.insert(all.end(), Delayed{stream, {}, {}});
  same->slots.push_back(slot);
  same->gradients.push_back(gradient);
  return true;
}

/// On the streams on which the gradients were put.
void RoundGradients::copy_bucket(engine::GradientSink& sink, std::size_t bucket) {
  if (!context_.stream.stream()) return;
  std::vector<Delayed> all;
  {
    MutexLock lock(context_.mutex);
    all.swap(delayed_[bucket]);
  }
  const at::NoGradGuard no_grad;
  for (const Delayed& delayed : all) {
    const c10::StreamGuard on_stream(delayed.stream);
    std::vector<at::Tensor> views;
    for (const std::size_t slot : delayed.slots) views.push_back(buckets_->view(slot));
    device::compat::copy_all(views, delayed.gradients);
    if (factor(bucket) != 1) at::_foreach_mul_(views, at::Scalar(factor(bucket)));
    for (const std::size_t slot : delayed.slots) {
      if (is_view(slot)) sink.replace(context_.slots.tensor(slot), buckets_->view(slot));
    }
  }
}

void RoundGradients::copy_delayed(engine::GradientSink& sink) {
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) copy_bucket(sink, bucket);
}

void RoundGradients::note_arrival(std::size_t bucket) {
  const auto stream = context_.stream.current();
  if (!stream && !measured_) return;
  const TimePoint now = measured_ ? context_.runtime.executor.now() : TimePoint();
  MutexLock lock(context_.mutex);
  if (stream) producers_[bucket].add(*stream);
  if (!measured_) return;
  last_gradient_ = now;
  if (!first_gradient_) first_gradient_ = now;
}

std::vector<std::size_t> RoundGradients::missing() const {
  std::vector<std::size_t> slots;
  for (std::size_t slot = 0; slot < accepted_.size(); ++slot) {
    if (!accepted_[slot]) slots.push_back(slot);
  }
  return slots;
}

std::vector<std::uint32_t> RoundGradients::order() const {
  const std::size_t count = std::min(ordered_.load(), order_.size());
  return {order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count)};
}

void RoundGradients::wait_for_producers(std::size_t bucket) {
  MutexLock lock(context_.mutex);
  producers_[bucket].wait(*context_.stream.events());
}

void RoundGradients::launch_full() {
  for (;;) {
    std::size_t bucket = 0;
    {
      MutexLock lock(context_.mutex);
      if (stopped_ || launching_ || next_ == buckets_->size() || full_[next_] == 0) return;
      launching_ = true;
      bucket = next_;
    }
    launch(bucket);
    MutexLock lock(context_.mutex);
    launching_ = false;
    ++next_;
  }
}

void RoundGradients::launch(std::size_t bucket) {
  const at::NoGradGuard no_grad;
  const TimePoint began = context_.runtime.executor.now();
  bool given_up = false;
  {
    MutexLock lock(context_.mutex);
    if (bucket == 0) first_launch_ = began;
    broken_ = true;  // unless the launch succeeds
    given_up = stopped_;
  }
  const StreamScope on_stream(context_.stream.stream());
  wait_for_producers(bucket);
  works_[bucket] = reduce(bucket, given_up);
  {
    MutexLock lock(context_.mutex);
    broken_ = false;
  }
  if (!measured_) return;
  works_[bucket].add_done_callback([hold = context_.holds.take(), &runtime = context_.runtime, bucket,
                                    round = round_, bytes = buckets_->bytes(bucket),
                                    began = context_.runtime.executor.now()](const Future<at::Tensor>&) {
    runtime.spans.record(SpanKind::kBucket, fmt::format("bucket {}", bucket), began,
                         SpanLink{.id = round, .part = static_cast<std::int32_t>(bucket), .bytes = bytes});
  });
}

Future<at::Tensor> RoundGradients::reduce(std::size_t bucket, bool given_up) {
  at::Tensor outgoing = buckets_->outgoing(bucket);
  if (!context_.comm_hook) {
    const bool averages = group_averages(context_, buckets_->dtype(bucket), divisor_);
    return context_.group.all_reduce(outgoing, averages ? collective::kAvg : collective::kSum);
  }
  GradientBucket argument;
  argument.index = bucket;
  argument.is_last = bucket + 1 == buckets_->size();
  for (const std::size_t parameter : buckets_->parameters(bucket)) {
    argument.gradients.push_back(buckets_->view(parameter));
    argument.parameters.push_back(context_.slots.name(parameter));
    argument.parameter_tensors.push_back(context_.slots.tensor(parameter));
  }
  argument.divisor = divisor_;
  argument.given_up = given_up;
  argument.buffer = std::move(outgoing);
  Future<at::Tensor> work = context_.comm_hook(argument, context_.group);
  if (!work.valid()) {
    throw_invalid("the communication hook returned an empty future for bucket {}", bucket);
  }
  return work;
}

void RoundGradients::stop() {
  MutexLock lock(context_.mutex);
  stopped_ = true;
}

void RoundGradients::leave_buckets(engine::GradientSink& sink) const {
  if (in_place_) move_out_of_buckets(context_, *buckets_, sink, /*keep_values=*/false);
}

void RoundGradients::launch_zeros() {
  const at::NoGradGuard no_grad;
  const StreamScope on_stream(context_.stream.stream());
  const ParameterSlots& slots = context_.slots;
  std::size_t bucket = 0;
  {
    MutexLock lock(context_.mutex);
    bucket = next_;
  }
  for (; bucket < buckets_->size(); ++bucket) {
    wait_for_producers(bucket);
    for (const std::size_t parameter : buckets_->parameters(bucket)) {
      for (std::size_t replica = 0; replica < slots.replicas().size(); ++replica)
        buckets_->put_nothing(replica * slots.count() + parameter);
    }
    launch(bucket);
    MutexLock lock(context_.mutex);
    next_ = bucket + 1;
  }
}

bool RoundGradients::is_broken() const {
  MutexLock lock(context_.mutex);
  return broken_;
}

void RoundGradients::set_broken() {
  MutexLock lock(context_.mutex);
  broken_ = true;
}

void RoundGradients::end_backward() {
  std::optional<TimePoint> began;
  {
    MutexLock lock(context_.mutex);
    began = first_gradient_;
  }
  waiting_.emplace(context_.runtime.spans, SpanKind::kWait, "wait for reduction", round_);
  if (began) context_.runtime.spans.record(SpanKind::kBucket, "backward", *began, round_);
}

std::weak_ptr<ContinuationExecutor> RoundGradients::hook_continuations() const {
  std::weak_ptr<ContinuationExecutor> continuations;
  for (const auto& work : works_) {
    if (context_.comm_hook && continuations.expired()) continuations = work.continuations();
  }
  return continuations;
}

void RoundGradients::check_hook_results() const {
  if (!context_.comm_hook) return;
  const StreamScope on_stream(context_.stream.stream());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    check_result(*buckets_, bucket, works_[bucket].wait());
}

void RoundGradients::take_results() {
  const StreamScope on_stream(context_.stream.stream());
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket)
    buckets_->take(bucket, works_[bucket].wait());
}

std::shared_ptr<const ValueGate> RoundGradients::gate() const {
  std::vector<std::shared_ptr<const ValueGate>> gates;
  for (const auto& work : works_) gates.push_back(work.gate());
  return context_.stream.gate(std::move(gates));
}

std::string RoundGradients::failed_bucket() const {
  for (std::size_t bucket = 0; bucket < works_.size(); ++bucket) {
    if (!works_[bucket].done() || !works_[bucket].error()) continue;
    return fmt::format("bucket {} of {} (with '{}')", bucket, works_.size(),
                       context_.slots.name(buckets_->parameters(bucket)[0]));
  }
  return {};
}

void RoundGradients::note_times() {
  waiting_.reset();
  if (!measured_) return;
  const TimePoint now = context_.runtime.executor.now();
  TimePoint launched;
  {
    MutexLock lock(context_.mutex);
    launched = first_launch_;
    ReducerStats& stats = context_.stats;
    stats.measured = round_;
    stats.backward = first_gradient_ ? last_gradient_ - *first_gradient_ : Duration::zero();
    stats.communication = now - launched;
    stats.overlap = std::max(Duration::zero(), std::min(last_gradient_, now) - launched);
  }
  context_.runtime.spans.record(SpanKind::kBucket, "reduction", launched, round_);
}

void RoundGradients::write_back(engine::GradientSink& sink, const std::vector<std::uint8_t>& used) const {
  const at::NoGradGuard no_grad;
  const ParameterSlots& slots = context_.slots;
  const auto is_used = [&](std::size_t slot) { return used.empty() || used[slot % slots.count()] != 0; };
  std::vector<Copies> copies(buckets_->size());
  for (std::size_t slot = 0; slot < slots.size(); ++slot) {
    if (is_used(slot)) write_slot(sink, slot, copies[buckets_->bucket_of(slot)]);
  }
  for (Copies& bucket : copies) device::compat::copy_all(bucket.to, bucket.from);
  std::vector<std::pair<std::size_t, at::Tensor>> kept;
  {
    MutexLock lock(context_.mutex);
    kept = kept_;
  }
  for (const auto& [slot, gradient] : kept) {
    if (is_used(slot) || !is_view(slot)) continue;
    const at::Tensor& view = buckets_->view(slot);
    view.copy_(gradient);
    sink.replace(slots.tensor(slot), view);
  }
}

void RoundGradients::write_slot(engine::GradientSink& sink, std::size_t slot, Copies& copies) const {
  const at::Tensor& parameter = context_.slots.tensor(slot);
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

void RoundGradients::move_to(Buckets& rebuilt, engine::GradientSink& sink) const {
  const at::NoGradGuard no_grad;
  for (std::size_t slot = 0; in_place_ && slot < context_.slots.size(); ++slot) {
    const at::Tensor gradient = sink.gradient(context_.slots.tensor(slot));
    if (!buckets_->holds(slot, gradient)) continue;
    rebuilt.put(slot, gradient, 1);
    sink.replace(context_.slots.tensor(slot), rebuilt.view(slot));
  }
}

}  // namespace torchspan::data_parallel
