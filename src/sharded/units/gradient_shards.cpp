#include "sharded/units/gradient_shards.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <torchspan/core/error.h>

#include "sharded/units/unit.h"

namespace torchspan::sharded {

void ReductionQueue::push(std::size_t bytes, End end) {
  running_.push_back({bytes, std::move(end)});
  bytes_ += bytes;
  pool_->count(bytes);
  while (bytes_ > limit_) end_oldest();
}

void ReductionQueue::end_oldest() {
  Running oldest = std::move(running_.front());
  running_.pop_front();
  bytes_ -= oldest.bytes;
  oldest.end();
  oldest.end = nullptr;
  pool_->drop(oldest.bytes);
}

void ReductionQueue::end_all() {
  while (!running_.empty()) end_oldest();
}

void ReductionQueue::clear() {
  pool_->drop(bytes_);
  bytes_ = 0;
  running_.clear();
}

namespace {

/// Half overflows if it is summed before it is divided.
bool divides_first(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kComplexHalf; }

}  // namespace

GradientShards::GradientShards(FlatParameters& parameters, Terms terms)
    : parameters_(parameters),
      terms_(std::move(terms)),
      options_(parameters.part().options().dtype(terms_.dtype)),
      used_(parameters.entries().size()),
      summed_(parameters.entries().size()),
      sums_(parameters.layout().segments().size()),
      averages_(parameters.layout().segments().size()) {}

void GradientShards::check_dense(std::size_t entry, const at::Tensor& gradient) const {
  if (gradient.layout() != at::kStrided) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("parameter '{}' got a sparse gradient, which cannot be divided; make its embedding dense",
                    parameters_.entries()[entry].name));
  }
}

void GradientShards::add(std::size_t entry, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  check_dense(entry, gradient);
  summed_[entry] = 1;
  const FlatLayout& layout = parameters_.layout();
  const std::size_t index = layout.segment_of(entry);
  const Segment& segment = layout.segments()[index];
  at::Tensor& sum = sums_[index];
  if (!sum.defined()) sum = at::zeros({segment.chunk * parameters_.group().size()}, options_);
  sum.narrow(0, layout.offset(entry) - segment.begin, gradient.numel()).view(gradient.sizes()).add_(gradient);
}

at::Tensor GradientShards::whole(const Segment& segment, at::Tensor sum,
                                 std::vector<at::Tensor> gradients) const {
  const std::int64_t size = segment.chunk * parameters_.group().size();
  const bool is_new = !sum.defined();
  gradients.resize(segment.parameters.size());
  if (is_new && gradients.size() == 1 && gradients[0].defined()) {
    const at::Tensor& only = gradients[0];
    const bool fits = only.numel() == size && only.is_contiguous() && only.dtype() == options_.dtype();
    if (fits && !divides_first(only.scalar_type())) return only.detach().view({size});
  }
  if (is_new) sum = at::empty({size}, options_);
  std::int64_t end = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const FlatParameters::Entry& entry = parameters_.entries()[segment.parameters[i]];
    const std::int64_t begin = parameters_.layout().offset(segment.parameters[i]) - segment.begin;
    const at::Tensor target = sum.narrow(0, begin, entry.full.numel()).view(entry.full.sizes());
    end = begin + entry.full.numel();
    if (gradients[i].defined()) {
      is_new ? target.copy_(gradients[i]) : target.add_(gradients[i]);
      gradients[i].reset();
    } else if (is_new) {
      target.zero_();
    }
  }
  if (is_new) sum.narrow(0, end, size - end).zero_();
  if (divides_first(sum.scalar_type())) sum.mul_(1.0 / parameters_.group().size());
  return sum;
}

void GradientShards::reduce(std::size_t index, std::vector<at::Tensor> gradients) {
  const at::NoGradGuard no_grad;
  const FlatLayout& layout = parameters_.layout();
  const Segment& segment = layout.segments()[index];
  const collective::Group& group = parameters_.group();
  // Here and not earlier: a commit of an inner pass, which may come before, forgets what is used.
  for (std::size_t i = 0; i < segment.parameters.size(); ++i) {
    const std::size_t entry = segment.parameters[i];
    const bool has_new = i < gradients.size() && gradients[i].defined();
    if (std::exchange(summed_[entry], 0) != 0 || has_new) used_[entry] = 1;
  }
  at::Tensor sent = whole(segment, std::exchange(sums_[index], {}), std::move(gradients));
  // As rows, because the rows' length differs between units: ranks that reduce different ones get an error.
  std::vector<std::int64_t> rows{group.size(), segment.chunk};
  if (index != layout.shared()) rows.push_back(1);
  Future<at::Tensor> running = group.reduce_scatter(
      sent.view(rows), divides_first(sent.scalar_type()) ? collective::kSum : collective::kAvg);
  const std::size_t bytes = sent.nbytes();
  terms_.queue->push(bytes, [this, index, sent = std::move(sent), running = std::move(running)] {
    keep(index, running.wait().view({-1}), sent);
  });
}

void GradientShards::reduce_all() {
  for (std::size_t segment = 0; segment < sums_.size(); ++segment) reduce(segment, {});
  has_sums_ = false;
}

void GradientShards::keep(std::size_t segment, at::Tensor part, const at::Tensor& sent) {
  const at::NoGradGuard no_grad;
  if (part.data_ptr() == sent.data_ptr()) part = part.clone();  // a gradient that others may have
  if (terms_.replicas) {
    const bool divides = divides_first(part.scalar_type());
    if (divides) part.mul_(1.0 / terms_.replicas->size());
    part = terms_.replicas->all_reduce(part, divides ? collective::kSum : collective::kAvg).wait();
  }
  at::Tensor& average = averages_[segment];
  if (average.defined()) {
    average.add_(part);
  } else {
    average = part.to(parameters_.part().scalar_type());
  }
}

void GradientShards::commit(const std::int32_t* used) {
  const at::NoGradGuard no_grad;
  std::fill(used_.begin(), used_.end(), 0);
  const FlatLayout& layout = parameters_.layout();
  std::vector<at::Tensor> averages(averages_.size());
  averages.swap(averages_);
  for (std::size_t i = 0; i < parameters_.entries().size(); ++i) {
    const at::Tensor& average = averages[layout.segment_of(i)];
    if (used[i] == 0 || !average.defined()) continue;
    const FlatParameters::Entry& entry = parameters_.entries()[i];
    const std::int64_t part = layout.segments()[layout.segment_of(i)].part;
    const std::int64_t start = entry.part.storage_offset() - parameters_.part().storage_offset() - part;
    const at::Tensor mine = average.narrow(0, start, entry.part.numel());
    at::Tensor& field = entry.tensor.mutable_grad();
    if (field.defined()) {
      field.add_(mine);
    } else {
      field = mine.variable_data();
    }
  }
}

void GradientShards::drop() {
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(summed_.begin(), summed_.end(), 0);
  std::fill(sums_.begin(), sums_.end(), at::Tensor());
  std::fill(averages_.begin(), averages_.end(), at::Tensor());
  has_sums_ = false;
}

GradientStream::GradientStream(Unit& unit, bool alone) : unit_(unit), alone_(alone) {
  for (const Unit::Part& part : unit.parts()) {
    if (!part.gradients) continue;
    const FlatLayout& layout = part.parameters->layout();
    const std::size_t first = places_.size();
    places_.resize(first + part.parameters->entries().size());
    const auto add_step = [&](std::size_t index) {
      const Segment& segment = layout.segments()[index];
      for (std::size_t i = 0; i < segment.parameters.size(); ++i)
        places_[first + segment.parameters[i]] = {steps_.size(), i, segment.parameters[i]};
      steps_.push_back({part.gradients.get(), index, segment.parameters.size(),
                        std::vector<at::Tensor>(segment.parameters.size())});
    };
    for (std::size_t index = layout.shared(); index-- > 0;) add_step(index);
    add_step(layout.shared());
    if (part.gradients->has_sums()) had_sums_.push_back(part.gradients.get());
    part.gradients->set_has_sums(false);
  }
}

void GradientStream::add(std::size_t trained, at::Tensor gradient) {
  if (!gradient.defined()) return;
  const Place& place = places_[trained];
  Step& step = steps_[place.step];
  step.gradients->check_dense(place.entry, gradient);
  step.arrived[place.position] = std::move(gradient);
  --step.missing;
  while (alone_ && next_ < steps_.size() && steps_[next_].missing == 0) reduce_next();
}

void GradientStream::reduce_next() {
  const StepPartScope scope = unit_.operations();
  Step& step = steps_[next_++];
  step.gradients->reduce(step.segment, std::move(step.arrived));
}

std::size_t GradientStream::complete() const {
  std::size_t count = next_;
  while (count < steps_.size() && steps_[count].missing == 0) ++count;
  return count;
}

/// The answer is awaited one point later, when it has long arrived.
void GradientStream::pass_point(const collective::Group& group) {
  if (alone_ || next_ == steps_.size()) return;
  const at::NoGradGuard no_grad;
  if (all_complete_.valid()) {
    const auto count = static_cast<std::size_t>(std::exchange(all_complete_, {}).wait().item<std::int64_t>());
    while (next_ < count) reduce_next();
  }
  if (next_ == steps_.size()) return;
  const at::Tensor mine = at::full({1}, static_cast<std::int64_t>(complete()), at::kLong);
  all_complete_ = group.all_reduce(mine, collective::kMin);
}

void GradientStream::finish() {
  const bool began = alone_ || next_ > 0;
  while (next_ < steps_.size()) reduce_next();
  if (began) return;  // a sum may have grown after its segment was reduced
  for (const Step& step : steps_) step.gradients->set_has_sums(false);
}

void GradientStream::abandon() {
  for (GradientShards* gradients : had_sums_) gradients->set_has_sums(true);
}

}  // namespace torchspan::sharded
