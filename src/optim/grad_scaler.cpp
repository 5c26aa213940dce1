#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale_ops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/grad_scaler.h>

#include "device/api/tensors.h"
#include "optim/operators.h"
#include "optim/parameters.h"
#include "state/api/gradient_norm.h"

namespace torchspan::optim {
namespace {

constexpr const char* kUnscale = "aten::_amp_foreach_non_finite_check_and_unscale_";

/// Gradients by device and dtype.
using GradientGroups =
    std::map<std::tuple<at::DeviceType, at::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>>;

/// Whether the operator, if the device has it, may take the gradient. It multiplies by a float, which is too coarse for
/// doubles.
bool fits_operator(const at::Tensor& gradient) {
  const at::ScalarType dtype = gradient.scalar_type();
  return !gradient.is_cpu() && gradient.layout() == at::kStrided && gradient.numel() != 0 &&
         can_index_with_int(gradient) && (dtype == at::kFloat || dtype == at::kHalf);
}

/// Divides gradients and keeps what it finds on their devices, until one read takes all of it.
class Unscaling {
 public:
  explicit Unscaling(double scale) : inverse_(1 / scale) {}

  /// Gradients of one device and dtype for which fits_operator() is true.
  void together(const std::vector<at::Tensor>& gradients) {
    if (by_operator(gradients)) return;
    for (const at::Tensor& gradient : gradients) one_by_one(gradient);
  }

  void one_by_one(const at::Tensor& gradient) {
    const at::Tensor values = gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
    if (values.numel() != 0) {
      constexpr double kLargest = std::numeric_limits<double>::infinity();
      norms_.push_back(at::linalg_vector_norm(device::widened(values), kLargest));
    }
    gradient.mul_(inverse_);
  }

  bool found_inf() const {
    std::vector<at::Tensor> all = flags_;
    all.insert(all.end(), norms_.begin(), norms_.end());
    const std::vector<double> numbers = device::read_numbers(all);
    const auto norms = numbers.begin() + static_cast<std::ptrdiff_t>(flags_.size());
    return std::any_of(numbers.begin(), norms, [](double flag) { return flag != 0; }) ||
           !std::all_of(norms, numbers.end(), [](double norm) { return std::isfinite(norm); });
  }

 private:
  /// Returns false, and changes nothing, if the device does not have the operator.
  bool by_operator(const std::vector<at::Tensor>& gradients) {
    using Signature = at::_ops::_amp_foreach_non_finite_check_and_unscale_::schema;
    if (!has_operator(kUnscale, gradients.front())) return false;
    const at::TensorOptions options = gradients.front().options().dtype(at::kFloat);
    at::Tensor found = at::zeros({1}, options);
    const at::Tensor inverse = at::full({1}, inverse_, options);
    if (!call_operator<Signature>(kUnscale, gradients.front(), at::TensorList(gradients), found, inverse))
      return false;
    flags_.push_back(found);
    return true;
  }

  const double inverse_;
  std::vector<at::Tensor> flags_;  ///< of the operator: 0 if all elements were finite
  std::vector<at::Tensor> norms_;  ///< of other gradients: the largest absolute value
};

/// Divides gradients, each of which is listed once, by `scale`, in place, and returns whether an element was not
/// finite. Waits once, however many devices and tensors there are (coalescing of sparse gradients aside). Float and
/// half gradients of devices that have LibTorch's operator for this are read and written once, in one launch for each
/// device and dtype.
bool unscale_gradients(const std::vector<at::Tensor>& gradients, double scale) {
  const at::NoGradGuard no_grad;
  GradientGroups groups;
  Unscaling unscaling(scale);
  for (const at::Tensor& gradient : gradients) {
    if (fits_operator(gradient)) {
      const at::Device device = gradient.device();
      groups[{device.type(), device.index(), gradient.scalar_type()}].push_back(gradient);
    } else {
      unscaling.one_by_one(gradient);
    }
  }
  for (const auto& [like, group] : groups) unscaling.together(group);
  return unscaling.found_inf();
}

[[noreturn]] void reject(const std::string& trouble) { throw_invalid("GradScaler: " + trouble); }

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
  iteration_[&optimizer] = {.complete = true, .found_inf = found_inf, .context = context.id()};
}

bool GradScaler::begin_step(const void* optimizer, std::uint64_t context) const {
  const auto found = iteration_.find(optimizer);
  if (found == iteration_.end() || found->second.unchanged) return false;
  if (!found->second.complete) reject(kUnscaleFailed);
  if (found->second.stepped) reject("step() was already called for this optimizer since the last update()");
  if (found->second.context != context)
    reject("unscale_() was called with another autograd context than step(): pass both the same one");
  return true;
}

bool GradScaler::end_step(const void* optimizer) {
  if (!options_.enabled) return true;
  Progress& progress = iteration_[optimizer];
  progress.stepped = true;
  return !progress.found_inf;
}

bool GradScaler::step(DistributedOptimizer& optimizer, const autograd::ContextView& context) {
  if (!begin_step(&optimizer, context.id())) unscale_(optimizer, context);
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
