#include <cmath>
#include <fmt/format.h>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/functional.h>

namespace torchspan::optim {

FunctionalOptimizer::FunctionalOptimizer(std::string name, std::vector<at::Tensor> parameters)
    : name_(std::move(name)), parameters_(std::move(parameters)) {
  if (parameters_.empty()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{} got no parameters: there is nothing to optimize", name_));
  }
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& parameter = parameters_[i];
    if (!parameter.defined()) {
      throw Error(ErrorKind::kInvalid, fmt::format("{}: parameter {} is undefined", name_, i));
    }
    if (!parameter.is_leaf()) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("{}: {} is the result of a computation; give the leaf that it was computed from", name_,
                      describe(i)));
    }
    const auto [first, is_new] = seen.emplace(parameter.unsafeGetTensorImpl(), i);
    if (!is_new) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("{}: {} is parameter {} once more, and would be updated twice a step: name it once",
                      name_, describe(i), first->second));
    }
  }
}

std::string FunctionalOptimizer::describe(std::size_t index) const {
  const at::Tensor& parameter = parameters_[index];
  return fmt::format("parameter {} (shape {}, {})", index, c10::str(parameter.sizes()),
                     c10::toString(parameter.scalar_type()));
}

void FunctionalOptimizer::check(std::size_t index, const at::Tensor& gradient) const {
  const at::Tensor& parameter = parameters_[index];
  if (gradient.sizes() != parameter.sizes() || gradient.scalar_type() != parameter.scalar_type()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{}: {} got a gradient of shape {}, {}", name_, describe(index),
                            c10::str(gradient.sizes()), c10::toString(gradient.scalar_type())));
  }
  if (gradient.device() != parameter.device()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("{}: {} lives on {} and got a gradient on {}", name_, describe(index),
                            parameter.device().str(), gradient.device().str()));
  }
  if (gradient.layout() == at::kStrided) return;
  if (gradient.layout() != at::kSparse) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("{}: {} got a gradient of layout {}: only dense and sparse COO gradients can be used",
                    name_, describe(index), c10::str(gradient.layout())));
  }
  if (std::string reason = refuse_sparse(parameter); !reason.empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: {} got a sparse gradient, {}", name_, describe(index), reason));
  }
}

void FunctionalOptimizer::step(std::span<const at::Tensor> gradients) {
  if (gradients.size() != parameters_.size()) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format(
            "{} has {} parameters and got {} gradients: give one for each, undefined for those to skip",
            name_, parameters_.size(), gradients.size()));
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) check(i, gradients[i]);
  }
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) update(i, parameters_[i], gradients[i]);
  }
}

void check_not_negative(std::string_view optimizer, std::string_view option, double value) {
  if (std::isfinite(value) && value >= 0) return;
  throw Error(ErrorKind::kInvalid,
              fmt::format("{}: {} = {}, but it must be a number from 0 up", optimizer, option, value));
}

}  // namespace torchspan::optim
