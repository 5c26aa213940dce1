#include "torchspan/optim/grad_scaler.h"

#include <cmath>
#include <fmt/format.h>
#include <limits>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "device/api/tensors.h"
#include "optim/parameters.h"
#include "optim/unscale.h"
#include "state/api/gradient_norm.h"

namespace torchspan::optim {
namespace {

[[noreturn]] void reject(const std::string& trouble) {
  throw Error(ErrorKind::kInvalid, "GradScaler: " + trouble);
}

constexpr const char* kUnscaleFailed =
    "an earlier unscale_() failed after it divided gradients; compute new gradients and call update()";

GradScalerOptions checked(GradScalerOptions options) {
  const auto check = [](bool good, const char* name, double value, const char* range) {
    if (!good) reject(fmt::format("{} = {}, but it must be {}", name, value, range));
  };
  check(options.init_scale > 0 && std::isfinite(options.init_scale), "init_scale", options.init_scale,
        "a number above 0");
  check(options.growth_factor > 1 && std::isfinite(options.growth_factor), "growth_factor",
        options.growth_factor, "a number above 1");
  check(options.backoff_factor > 0 && options.backoff_factor < 1, "backoff_factor", options.backoff_factor,
        "between 0 and 1");
  check(options.growth_interval >= 1, "growth_interval", options.growth_interval, "1 or more");
  return options;
}

const at::Tensor& number_of(const StateDict& state, const char* name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr || found->numel() != 1) reject(fmt::format("the state has no number '{}'", name));
  return *found;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : options_(checked(std::move(options))), scale_(options_.init_scale) {}

at::Tensor GradScaler::scale(const at::Tensor& output) const {
  if (!options_.enabled) return output;
  return device::widened(output) * scale_;
}

void GradScaler::check_first_unscale(const void* optimizer) const {
  const auto found = iteration_.find(optimizer);
  if (found == iteration_.end() || found->second.unchanged) return;
  if (!found->second.complete) reject(kUnscaleFailed);
  reject(found->second.stepped ? "unscale_() was called after step(); call update() first"
                               : "unscale_() was already called for this optimizer since the last update()");
}

void GradScaler::unscale(const void* optimizer, const std::vector<at::Tensor>& parameters) {
  if (!options_.enabled) return;
  refuse_steps_in_backward(parameters, "unscale_()");
  unscale(optimizer, [&](double scale) {
    iteration_[optimizer] = {};  // from here on, some gradients may be divided
    const bool found = unscale_gradients(gradients_of(parameters), scale);
    return state::on_any_rank(state::gradients_at_places(parameters), found);
  });
}

void GradScaler::unscale(const void* optimizer, const std::function<bool(double scale)>& divide) {
  if (!options_.enabled) return;
  check_first_unscale(optimizer);
  iteration_[optimizer] = {.unchanged = true};
  bool found_inf = divide(scale_);
  iteration_[optimizer] = {};
  if (options_.agree) found_inf = options_.agree(found_inf);
  iteration_[optimizer] = {.complete = true, .found_inf = found_inf};
}

void GradScaler::unscale_(DistributedOptimizer& optimizer, const autograd::ContextView& context) {
  if (!options_.enabled) return;
  check_first_unscale(&optimizer);
  iteration_[&optimizer] = {.unchanged = true};
  const bool found_inf = !optimizer.scale_gradients(context, 1 / scale_, options_.replicas);
  iteration_[&optimizer] = {.complete = true, .found_inf = found_inf};
}

bool GradScaler::begin_step(const void* optimizer) const {
  const auto found = iteration_.find(optimizer);
  if (found == iteration_.end() || found->second.unchanged) return false;
  if (!found->second.complete) reject(kUnscaleFailed);
  if (found->second.stepped) reject("step() was already called for this optimizer since the last update()");
  return true;
}

bool GradScaler::end_step(const void* optimizer) {
  if (!options_.enabled) return true;
  Progress& progress = iteration_[optimizer];
  progress.stepped = true;
  return !progress.found_inf;
}

bool GradScaler::step(DistributedOptimizer& optimizer, const autograd::ContextView& context) {
  if (!begin_step(&optimizer)) unscale_(optimizer, context);
  if (!end_step(&optimizer)) return false;
  optimizer.step(context);
  return true;
}

void GradScaler::end_iteration(double scale, int tracker) {
  scale_ = scale;
  growth_tracker_ = tracker;
  iteration_.clear();
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (iteration_.empty()) reject("update() was called, but no step() or unscale_() since the last update()");
  bool found_inf = false;
  for (const auto& [optimizer, progress] : iteration_) {
    if (!progress.complete) return end_iteration(scale_, growth_tracker_);
    found_inf = found_inf || progress.found_inf;
  }
  if (found_inf) return end_iteration(scale_ * options_.backoff_factor, 0);
  if (growth_tracker_ + 1 < options_.growth_interval) return end_iteration(scale_, growth_tracker_ + 1);
  // The scale multiplies float losses, so it must stay representable as a float.
  const double grown = scale_ * options_.growth_factor;
  end_iteration(grown <= std::numeric_limits<float>::max() ? grown : scale_, 0);
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  if (!(new_scale > 0) || !std::isfinite(new_scale)) {
    reject(fmt::format("the new scale is {}, but it must be a number above 0", new_scale));
  }
  end_iteration(new_scale, growth_tracker_);
}

StateDict GradScaler::state_dict() const {
  StateDict state;
  state.insert("scale", at::scalar_tensor(scale_, at::kDouble));
  state.insert("growth_tracker", at::scalar_tensor(growth_tracker_, at::kLong));
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  const double scale = number_of(state, "scale").item<double>();
  const auto tracker = number_of(state, "growth_tracker").item<std::int64_t>();
  if (state.size() != 2) reject(fmt::format("the state has {} entries instead of 2", state.size()));
  if (!(scale > 0) || !std::isfinite(scale)) reject(fmt::format("the state has scale {}", scale));
  if (tracker < 0 || tracker > std::numeric_limits<int>::max()) {
    reject(fmt::format("the state has growth_tracker {}", tracker));
  }
  end_iteration(scale, static_cast<int>(tracker));
}

}  // namespace torchspan::optim
