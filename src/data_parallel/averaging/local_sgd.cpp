#include <algorithm>
#include <atomic>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <optional>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/data_parallel/local_sgd.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/averaging/packed_tensors.h"
#include "device/api/tensors.h"
#include "state/api/save_load.h"

namespace torchspan::data_parallel {
namespace {

/// "parameter 3": these tensors have no names.
std::string parameter_name(std::size_t index) { return fmt::format("parameter {}", index); }

/// Whether ranks average the tensor. Those of integers cannot be trained: they must be alike, and stay as they are.
bool is_averaged(const at::Tensor& tensor) {
  return !tensor.defined() || !c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

/// What this rank has of a parameter: the tensor, or its part.
at::Tensor averaged_elements(const at::Tensor& parameter) {
  return state::elements_of(parameter, state::place_of(parameter));
}

/// What the ranks that average `parameters` must have in common. Records as a failure of this rank a tensor
/// that cannot be averaged. Ranks that have different parts of a parameter do not agree.
Agreement agreement_on(const collective::Group& group, const std::vector<at::Tensor>& parameters,
                       std::vector<std::pair<std::string, std::string>> settings) {
  Agreement agreement;
  agreement.settings = std::move(settings);
  if (std::none_of(parameters.begin(), parameters.end(), is_averaged)) {
    agreement.failure = "there are no parameters to average";
    if (!parameters.empty()) {
      agreement.failure += fmt::format(": {} is {}, and no other one has a floating-point dtype",
                                       parameter_name(0), c10::toString(parameters[0].scalar_type()));
    }
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i];
    if (!is_averaged(tensor)) {
      agreement.add(parameter_name(i), tensor);
      continue;
    }
    if (!tensor.defined() || tensor.is_sparse() || !tensor.is_floating_point()) {
      agreement.failure = fmt::format(
          "{} is {}; only dense tensors of a floating-point dtype can be averaged", parameter_name(i),
          tensor.defined() ? c10::toString(tensor.scalar_type()) : "undefined");
      return agreement;
    }
    const state::PlacePtr place = state::place_of(tensor);
    if (place && place->own) {
      agreement.failure = fmt::format(
          "{} is this rank's own (DataParallelOptions::ignored_parameters), so it has no average: leave it "
          "out",
          parameter_name(i));
      return agreement;
    }
    try {
      check_device(group, parameter_name(i), tensor);
    } catch (const Error& error) {
      agreement.failure = error.message();
      return agreement;
    }
    agreement.add(parameter_name(i), tensor);
  }
  return agreement;
}

CommHook make_local_hook(std::int64_t start_iteration, std::optional<collective::Group> near) {
  if (start_iteration < 0) {
    throw_invalid("start_iteration is {}; it must not be negative", start_iteration);
  }
  const auto begun = std::make_shared<std::atomic<std::int64_t>>(0);
  return [start_iteration, near = std::move(near), begun](const GradientBucket& bucket,
                                                          const collective::Group& group) {
    if (bucket.index == 0) ++*begun;
    if (*begun <= start_iteration) return all_reduce_hook()(bucket, group);
    if (!near) return make_ready_future<at::Tensor>(bucket.buffer);
    GradientBucket local = bucket;
    local.divisor = near->size();
    return all_reduce_hook()(local, *near);
  };
}

void check_levels(const std::vector<AveragingLevel>& levels) {
  if (levels.empty()) throw_invalid("ModelAverager needs at least one level");
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::int64_t period = levels[i].period, before = i == 0 ? 1 : levels[i - 1].period;
    if (period < 1 || period % before != 0 || (i > 0 && period == before)) {
      throw_invalid("the period of averaging level {} is {}; it must be a multiple of {}{}", i, period,
                    before, i == 0 ? "" : ", the period before it, and larger");
    }
  }
}

}  // namespace

CommHook post_local_sgd_hook(std::int64_t start_iteration) {
  return make_local_hook(start_iteration, std::nullopt);
}

CommHook post_local_sgd_hook(std::int64_t start_iteration, collective::Group near) {
  return make_local_hook(start_iteration, std::move(near));
}

ModelAverager::ModelAverager(std::vector<at::Tensor> parameters, std::vector<AveragingLevel> levels,
                             std::int64_t warmup_steps)
    : parameters_(std::move(parameters)), levels_(std::move(levels)), warmup_steps_(warmup_steps) {
  check_levels(levels_);
  for (const AveragingLevel& level : levels_) {
    agree(level.group,
          agreement_on(
              level.group, parameters_,
              {{"period", std::to_string(level.period)}, {"warmup_steps", std::to_string(warmup_steps)}}),
          "parameters");
  }
}

ModelAverager::ModelAverager(std::vector<at::Tensor> parameters, collective::Group group, std::int64_t period,
                             std::int64_t warmup_steps)
    : ModelAverager(std::move(parameters), {{std::move(group), period}}, warmup_steps) {}

bool ModelAverager::step() {
  const at::NoGradGuard no_grad;
  ++steps_;
  const std::int64_t steps = steps_ - warmup_steps_;
  const auto due = std::find_if(levels_.rbegin(), levels_.rend(), [&](const AveragingLevel& level) {
    return steps > 0 && steps % level.period == 0;
  });
  if (due == levels_.rend()) return false;
  std::vector<at::Tensor> elements;
  for (const at::Tensor& parameter : parameters_) {
    if (is_averaged(parameter)) elements.push_back(averaged_elements(parameter));
  }
  const std::vector<at::Tensor> averages = PackedAverages(due->group, elements).wait();
  for (std::size_t i = 0; i < averages.size(); ++i) elements[i].detach().copy_(averages[i]);
  return true;
}

namespace {

constexpr const char* kSteps = "steps";

std::string outer_name(std::size_t parameter) { return fmt::format("{}.outer", parameter); }
std::string momentum_name(std::size_t parameter) { return fmt::format("{}.momentum", parameter); }

/// The first place of each tensor in a list, without those that are not averaged.
std::vector<std::size_t> first_places(const std::vector<at::Tensor>& listed) {
  std::set<const c10::TensorImpl*> seen;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < listed.size(); ++i) {
    if (is_averaged(listed[i]) && seen.insert(listed[i].unsafeGetTensorImpl()).second) places.push_back(i);
  }
  return places;
}

/// Why the options are invalid; empty if they are valid.
std::string complaint(const DiLoCoOptions& options, std::size_t parameters) {
  if (options.period < 1) return fmt::format("period is {}; it must be at least 1", options.period);
  if (options.delay < 0 || options.delay >= options.period) {
    return fmt::format("delay is {}; it must be from 0 to period - 1, which is {}", options.delay,
                       options.period - 1);
  }
  if (!(options.keep >= 0 && options.keep <= 1)) {
    return fmt::format("keep is {}; it is a share from 0 to 1", options.keep);
  }
  const auto most = static_cast<std::int64_t>(std::min(static_cast<std::size_t>(options.period), parameters));
  if (options.fragments < 1 || options.fragments > std::max<std::int64_t>(most, 1)) {
    return fmt::format(
        "fragments is {}; it must be from 1 to {}, the smaller of period and the number of parameters",
        options.fragments, most);
  }
  return {};
}

}  // namespace

class DiLoCo::Impl {
 public:
  Impl(const std::vector<at::Tensor>& listed, collective::Group group, const DiLoCoOptions& options);

  bool step();
  void finish();
  std::int64_t steps() const { return steps_; }
  std::vector<std::pair<std::string, at::Tensor>> list() const;
  void load(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  struct Fragment {
    std::vector<std::size_t> parameters = {};
    std::int64_t turn = 0;                                 ///< its step within each period
    std::optional<PackedAverages> changes = std::nullopt;  ///< whose reduction runs
    std::int64_t arrival = 0;                              ///< the step that applies them
  };

  void make_fragments();
  void take_parameters_of_rank_0();
  void start(Fragment& fragment);
  void apply(Fragment& fragment);

  const std::vector<std::size_t> places_;  ///< in the list that the program gave, where a tensor may be twice
  std::vector<at::Tensor> parameters_;     ///< each once
  const collective::Group group_;
  const DiLoCoOptions options_;
  std::vector<at::Tensor> outer_;     ///< by parameter: its value after the last outer step
  std::vector<at::Tensor> momentum_;  ///< by parameter
  std::vector<Fragment> fragments_;
  std::int64_t steps_ = 0;
};

DiLoCo::Impl::Impl(const std::vector<at::Tensor>& listed, collective::Group group,
                   const DiLoCoOptions& options)
    : places_(first_places(listed)), group_(std::move(group)), options_(options) {
  for (const std::size_t place : places_) parameters_.push_back(averaged_elements(listed[place]));
  Agreement mine = agreement_on(group_, listed,
                                {{"period", std::to_string(options.period)},
                                 {"outer_lr", fmt::format("{}", options.outer_lr)},
                                 {"outer_momentum", fmt::format("{}", options.outer_momentum)},
                                 {"fragments", std::to_string(options.fragments)},
                                 {"delay", std::to_string(options.delay)}});
  if (mine.failure.empty()) {  // ranks must agree on which tensors are tied
    std::map<const c10::TensorImpl*, std::size_t> first;
    for (std::size_t i = 0; i < listed.size(); ++i) {
      const auto [place, is_new] = first.emplace(listed[i].unsafeGetTensorImpl(), i);
      if (!is_new) mine.tensors[i].type += ", the same tensor as " + parameter_name(place->second);
    }
  }
  const std::string wrong = complaint(options, parameters_.size());
  if (!wrong.empty()) mine.failure = "DiLoCoOptions::" + wrong;
  agree(group_, mine, "parameters");
  const at::NoGradGuard no_grad;
  take_parameters_of_rank_0();
  for (const at::Tensor& parameter : parameters_) {
    outer_.push_back(parameter.detach().clone());
    momentum_.push_back(at::zeros_like(outer_.back()));
  }
  make_fragments();
}

void DiLoCo::Impl::take_parameters_of_rank_0() {
  std::vector<Future<at::Tensor>> sent;
  std::vector<at::Tensor> copies;
  for (const at::Tensor& parameter : parameters_) {
    copies.push_back(parameter.detach().contiguous().clone());
    sent.push_back(group_.broadcast(copies.back(), 0));
  }
  for (std::size_t i = 0; i < sent.size(); ++i) parameters_[i].detach().copy_(sent[i].wait());
}

/// Consecutive parameters whose elements are about an equal share of the model's.
void DiLoCo::Impl::make_fragments() {
  const auto count = static_cast<std::size_t>(options_.fragments);
  std::int64_t total = 0, before = 0;
  for (const at::Tensor& parameter : parameters_) total += parameter.numel();
  fragments_.resize(count);
  for (std::size_t f = 0; f < count; ++f) {
    fragments_[f].turn =
        (static_cast<std::int64_t>(f) + 1) * options_.period / options_.fragments % options_.period;
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::int64_t middle = before + parameters_[i].numel() / 2;
    const auto share = total == 0 ? 0 : static_cast<std::size_t>(middle * options_.fragments / total);
    fragments_[std::min(share, count - 1)].parameters.push_back(i);
    before += parameters_[i].numel();
  }
  std::erase_if(fragments_, [](const Fragment& fragment) { return fragment.parameters.empty(); });
}

bool DiLoCo::Impl::step() {
  const at::NoGradGuard no_grad;
  ++steps_;
  bool applied = false;
  for (Fragment& fragment : fragments_) {
    if (steps_ % options_.period == fragment.turn) start(fragment);
    if (!fragment.changes || steps_ < fragment.arrival) continue;
    apply(fragment);
    applied = true;
  }
  return applied;
}

void DiLoCo::Impl::finish() {
  const at::NoGradGuard no_grad;
  for (Fragment& fragment : fragments_) {
    if (fragment.changes) apply(fragment);
  }
}

void DiLoCo::Impl::start(Fragment& fragment) {
  std::vector<at::Tensor> changes;
  for (const std::size_t i : fragment.parameters)
    changes.push_back(at::sub(outer_[i], parameters_[i].detach()));
  fragment.changes.emplace(group_, changes);
  fragment.arrival = steps_ + options_.delay;
}

void DiLoCo::Impl::apply(Fragment& fragment) {
  const PackedAverages under_way = std::move(*fragment.changes);
  fragment.changes.reset();
  const std::vector<at::Tensor> averages = under_way.wait();
  for (std::size_t k = 0; k < averages.size(); ++k) {
    const std::size_t i = fragment.parameters[k];
    momentum_[i].mul_(options_.outer_momentum).add_(averages[k]);
    outer_[i].sub_(at::add(averages[k], momentum_[i], options_.outer_momentum), options_.outer_lr);
    const at::Tensor parameter = parameters_[i].detach();
    if (options_.keep == 0) {
      parameter.copy_(outer_[i]);
    } else {
      parameter.copy_(device::widened(parameter).lerp(device::widened(outer_[i]), 1 - options_.keep));
    }
  }
}

std::vector<std::pair<std::string, at::Tensor>> DiLoCo::Impl::list() const {
  std::vector<std::pair<std::string, at::Tensor>> state = {{kSteps, at::full({}, steps_, at::kLong)}};
  for (std::size_t i = 0; i < outer_.size(); ++i) {
    state.emplace_back(outer_name(places_[i]), outer_[i].clone());
    state.emplace_back(momentum_name(places_[i]), momentum_[i].clone());
  }
  return state;
}

void DiLoCo::Impl::load(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  std::map<std::string, at::Tensor> entries(state.begin(), state.end());
  const auto entry = [&](const std::string& name, at::IntArrayRef sizes) {
    const auto found = entries.find(name);
    if (found != entries.end() && found->second.sizes() == sizes) return found->second;
    throw_invalid("the state of DiLoCo has {} '{}' of shape [{}]; it belongs to other parameters",
                  found == entries.end() ? "no" : "another", name, fmt::join(sizes.vec(), ", "));
  };
  std::vector<at::Tensor> outer, momentum;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    outer.push_back(entry(outer_name(places_[i]), parameters_[i].sizes()));
    momentum.push_back(entry(momentum_name(places_[i]), parameters_[i].sizes()));
  }
  const at::Tensor steps = entry(kSteps, {});
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    outer_[i].copy_(outer[i]);
    momentum_[i].copy_(momentum[i]);
  }
  for (Fragment& fragment : fragments_) fragment.changes.reset();
  steps_ = steps.item<std::int64_t>();
}

DiLoCo::DiLoCo(const std::vector<at::Tensor>& parameters, collective::Group group, DiLoCoOptions options)
    : impl_(std::make_unique<Impl>(parameters, std::move(group), options)) {}
DiLoCo::DiLoCo(DiLoCo&&) noexcept = default;
DiLoCo& DiLoCo::operator=(DiLoCo&&) noexcept = default;
DiLoCo::~DiLoCo() = default;
bool DiLoCo::step() { return impl_->step(); }
void DiLoCo::finish() { impl_->finish(); }
std::int64_t DiLoCo::steps() const { return impl_->steps(); }
std::vector<std::pair<std::string, at::Tensor>> DiLoCo::state() const { return impl_->list(); }
void DiLoCo::load_state(const std::vector<std::pair<std::string, at::Tensor>>& state) { impl_->load(state); }

}  // namespace torchspan::data_parallel
