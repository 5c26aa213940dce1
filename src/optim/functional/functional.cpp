#include <cmath>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <limits>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <torchspan/core/error.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/functional.h>

#include "core/api/throw_invalid.h"
#include "optim/parameters.h"
#include "optim/state_sources.h"

namespace torchspan::optim {

FunctionalOptimizer::FunctionalOptimizer(std::string name, std::vector<at::Tensor> parameters)
    : name_(std::move(name)), parameters_(std::move(parameters)) {
  check_parameters(name_, parameters_, {});
}

std::string FunctionalOptimizer::describe(std::size_t index) const {
  return describe_parameter(parameters_[index], index, parameter_names_);
}

void FunctionalOptimizer::check_one(std::size_t index, const at::Tensor& gradient) const {
  const at::Tensor& parameter = parameters_[index];
  if (gradient.sizes() != parameter.sizes() || gradient.scalar_type() != parameter.scalar_type()) {
    throw_invalid("{}: {} got a gradient of shape {}, {}", name_, describe(index), c10::str(gradient.sizes()),
                  c10::toString(gradient.scalar_type()));
  }
  if (gradient.device() != parameter.device()) {
    throw_invalid("{}: {} is on {} and got a gradient on {}", name_, describe(index),
                  parameter.device().str(), gradient.device().str());
  }
  if (gradient.layout() == at::kStrided) {
    const std::string reason = refuse_dense(parameter);
    if (reason.empty()) return;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: {} got a dense gradient, {}", name_, describe(index), reason));
  }
  if (gradient.layout() != at::kSparse) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("{}: {} got a gradient of layout {}; only dense and sparse COO gradients are supported",
                    name_, describe(index), c10::str(gradient.layout())));
  }
  if (std::string reason = refuse_sparse(parameter); !reason.empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: {} got a sparse gradient, {}", name_, describe(index), reason));
  }
}

void FunctionalOptimizer::check(std::span<const at::Tensor> gradients) const {
  if (gradients.size() != parameters_.size()) {
    throw_invalid(
        "{} has {} parameters and got {} gradients; pass one for each, an undefined one to skip a parameter",
        name_, parameters_.size(), gradients.size());
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) check_one(i, gradients[i]);
  }
}

void FunctionalOptimizer::step(std::span<const at::Tensor> gradients) {
  check(gradients);
  at::NoGradGuard no_grad;
  update_all(gradients);
}

void FunctionalOptimizer::step_one(std::size_t index, const at::Tensor& gradient) {
  std::vector<at::Tensor> gradients(parameters_.size());
  gradients.at(index) = gradient;
  step(gradients);
}

void FunctionalOptimizer::update_all(std::span<const at::Tensor> gradients) {
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined()) update(i, parameters_[i], gradients[i]);
  }
}

std::string FunctionalOptimizer::refuse_dense(const at::Tensor&) const { return {}; }

double FunctionalOptimizer::lr() const { return std::numeric_limits<double>::quiet_NaN(); }

void FunctionalOptimizer::set_lr(double) {
  throw Error(ErrorKind::kUnsupported, fmt::format("{} has no learning rate to set", name_));
}

void FunctionalOptimizer::set_hogwild(bool on) {
  if (!on) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("{} always changes version counters: set hogwild = false, or use an optimizer of this "
                  "library",
                  name_));
}

state::SourcePtr FunctionalOptimizer::state_source() { return source_of(*this); }

ParameterState FunctionalOptimizer::state(std::size_t) const { return {}; }

void FunctionalOptimizer::load_state(std::size_t index, const ParameterState& state) {
  if (state.empty()) return;
  throw_invalid("{}: the state has '{}' for {}, but this optimizer has no state", name_, state.begin()->first,
                describe(index));
}

namespace {

void check_option(bool fits, std::string_view optimizer, std::string_view option, double value,
                  const std::string& range) {
  if (fits && std::isfinite(value)) return;
  throw_invalid("{}: {} = {}, but it must be {}", optimizer, option, value, range);
}

}  // namespace

void check_not_negative(std::string_view optimizer, std::string_view option, double value) {
  check_option(value >= 0, optimizer, option, value, "a number from 0 up");
}

void check_share(std::string_view optimizer, std::string_view option, double value) {
  check_option(value >= 0 && value < 1, optimizer, option, value, "a number from 0 up and below 1");
}

void check_positive(std::string_view optimizer, std::string_view option, double value) {
  check_option(value > 0, optimizer, option, value, "a number above 0");
}

OptimizerTable::OptimizerTable() {
  add<SGD>();
  add<Adadelta>();
  add<Adagrad>();
  add<Adam>();
  add<Adamax>();
  add<AdamW>();
  add<RMSprop>();
  add<Rprop>();
  add<SparseAdam>();
}

OptimizerSpec::OptimizerSpec(std::string_view kind, std::uint64_t type, wire::Payload payload)
    : kind(kind), type(type), options(std::move(payload.value)) {
  if (!payload.tensors.empty() || !payload.references.empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("the options of optimizer '{}' contain tensors or references; a spec may contain "
                            "plain values only",
                            kind));
  }
}

std::unique_ptr<FunctionalOptimizer> OptimizerSpec::build(std::vector<at::Tensor> parameters) const {
  if (build_) return build_(std::move(parameters));
  throw_invalid(
      kind.empty()
          ? "a spec is empty; create it from an optimizer's options, as in Adam{.lr = 0.01}"
          : fmt::format(
                "the spec of '{}' came from another worker; build it with this worker's OptimizerTable",
                kind));
}

void OptimizerTable::insert(std::string_view kind, Entry entry) {
  if (!entries_.emplace(kind, std::move(entry)).second) {
    throw_invalid("there is an optimizer '{}' already; choose another kName", kind);
  }
}

std::vector<std::string> OptimizerTable::kinds() const {
  std::vector<std::string> kinds;
  for (const auto& [kind, entry] : entries_) kinds.push_back(kind);
  return kinds;
}

std::unique_ptr<FunctionalOptimizer> OptimizerTable::build(const OptimizerSpec& spec,
                                                           std::vector<at::Tensor> parameters) const {
  const auto found = entries_.find(spec.kind);
  if (found == entries_.end()) {
    throw_invalid(
        "there is no optimizer '{}' here, only {}; add its options to the OptimizerTable of every worker",
        spec.kind, fmt::join(kinds(), ", "));
  }
  if (found->second.type != spec.type) {
    throw_invalid(
        "the options of optimizer '{}' have another layout here than where the spec was created; run the "
        "same version of the program on all workers",
        spec.kind);
  }
  return found->second.build(spec.options, std::move(parameters));
}

}  // namespace torchspan::optim
