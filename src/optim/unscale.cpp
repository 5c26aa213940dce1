#include "optim/unscale.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale_ops.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include "device/api/tensors.h"
#include "optim/operators.h"

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

}  // namespace

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

}  // namespace torchspan::optim
