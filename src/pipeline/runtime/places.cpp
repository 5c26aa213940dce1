#include "pipeline/runtime/places.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <memory>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include "state/api/gradient_norm.h"

namespace torchspan::pipeline {
namespace {

/// The workers of a pipeline, each of which has other layers.
class PipelineRanks final : public state::Ranks {
 public:
  explicit PipelineRanks(const LocalPipeline& local)
      : worker_(local.worker),
        workers_(local.plan.workers),
        me_(local.me),
        timeout_(local.options.stall_timeout) {}

  const void* identity() const override { return this; }
  int level() const override { return state::kPipeline; }
  int rank() const override { return me_; }

  void reduce(std::vector<double>& numbers, bool maximum) const override {
    Bytes bytes(numbers.size() * sizeof(double));
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    std::fill(numbers.begin(), numbers.end(), 0.0);
    for (const Bytes& other : worker_.all_gather_bytes(bytes, workers_, timeout_)) {
      std::vector<double> theirs(numbers.size());
      std::memcpy(theirs.data(), other.data(), std::min(other.size(), bytes.size()));
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const bool largest = maximum && !std::isnan(theirs[i]) && !std::isnan(numbers[i]);
        numbers[i] = largest ? std::max(numbers[i], theirs[i]) : numbers[i] + theirs[i];
      }
    }
  }

 private:
  const Worker worker_;
  const std::vector<std::string> workers_;
  const int me_;
  const Duration timeout_;
};

/// Whether another copy of a tied parameter counts instead of this one.
bool counts_elsewhere(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (std::size_t copy = 0; copy < tie.copies.size(); ++copy) {
      if (tie.copies[copy].is_same(parameter)) return copy > 0 || tie.workers.front() != local.me;
    }
  }
  return false;
}

/// The first copy of the same tied parameter on this worker; undefined for that one, and for other parameters.
at::Tensor first_copy_here(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (std::size_t copy = 1; copy < tie.copies.size(); ++copy) {
      if (tie.copies[copy].is_same(parameter)) return tie.copies.front();
    }
  }
  return {};
}

}  // namespace

PipelinePlaces::PipelinePlaces(const LocalPipeline& local, const std::vector<at::Tensor>& parameters) {
  const auto ranks = std::make_shared<PipelineRanks>(local);
  for (const at::Tensor& parameter : parameters) {
    before_.emplace_back(parameter, state::place_of(parameter));
    const state::PlacePtr& before = before_.back().second;
    state::Place place = before ? *before : state::Place();
    place.repeated = place.repeated || counts_elsewhere(local, parameter);
    place.same_as = first_copy_here(local, parameter);
    place.among.push_back(ranks);
    state::set_place(parameter, std::make_shared<state::Place>(std::move(place)));
  }
}

PipelinePlaces::~PipelinePlaces() {
  for (auto& [parameter, place] : before_) state::set_place(parameter, std::move(place));
}

double clip_gradients(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  if (!(max_norm > 0))
    throw Error(ErrorKind::kInvalid,
                fmt::format("clip_grad_norm: max_norm is {}; it must be more than 0", max_norm));
  if (!(norm_type > 0))
    throw Error(ErrorKind::kInvalid,
                fmt::format("clip_grad_norm: norm_type is {}; it must be more than 0", norm_type));
  return state::clip(state::gradients_at_places(parameters), max_norm, norm_type);
}

}  // namespace torchspan::pipeline
