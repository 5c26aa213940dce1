#include <algorithm>
#include <limits>
#include <sstream>

#include <torch/optim/optimizer.h>
#include <torch/serialize.h>

#include <torchspan/optim/functional.h>

#include "core/api/throw_invalid.h"
#include "state/api/save_load.h"

namespace torchspan::optim {
namespace {

constexpr const char* kEntry = "torch";

/// Puts gradients into `.grad` while the scope lives.
class GradFieldScope {
 public:
  GradFieldScope(std::vector<at::Tensor>& parameters, std::span<const at::Tensor> gradients)
      : parameters_(parameters) {
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      before_.push_back(parameters_[i].grad());
      // A copy, because optimizers may change the gradient, which belongs to the caller.
      parameters_[i].mutable_grad() = gradients[i].defined() ? gradients[i].detach().clone() : at::Tensor();
    }
  }
  ~GradFieldScope() {
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = before_[i];
  }
  GradFieldScope(const GradFieldScope&) = delete;
  GradFieldScope& operator=(const GradFieldScope&) = delete;

 private:
  std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> before_;
};

std::string saved(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

void load(const std::string& bytes, torch::optim::Optimizer& optimizer) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  state::load_exactly(optimizer, archive);
}

}  // namespace

TorchOptimizer::TorchOptimizer(std::string name, std::vector<at::Tensor> parameters, const Make& make)
    : FunctionalOptimizer(std::move(name), std::move(parameters)), optimizer_(make(this->parameters())) {}

TorchOptimizer::~TorchOptimizer() = default;

void TorchOptimizer::update_all(std::span<const at::Tensor> gradients) {
  const GradFieldScope scope(parameters(), gradients);
  optimizer_->step();
}

double TorchOptimizer::lr() const { return detail::rate_of(optimizer_->param_groups().front().options()); }

void TorchOptimizer::set_lr(double lr) {
  check_not_negative(name(), "lr", lr);
  for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
}

ParameterState TorchOptimizer::state(std::size_t index) const {
  if (index > 0) return {};
  const std::string bytes = saved(*optimizer_);
  at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(tensor.data_ptr<std::uint8_t>()));
  return {{kEntry, tensor}};
}

void TorchOptimizer::load_state(std::size_t index, const ParameterState& state) {
  const auto found = state.find(kEntry);
  if (index > 0 ? !state.empty()
                : state.size() != 1 || found == state.end() || found->second.scalar_type() != at::kByte) {
    throw_invalid("{}: the state of {} is not of this kind of optimizer", name(), describe(index));
  }
  if (index > 0) return;
  const at::Tensor bytes = found->second.contiguous();
  const std::string before = saved(*optimizer_);
  try {
    load({reinterpret_cast<const char*>(bytes.data_ptr<std::uint8_t>()),
          static_cast<std::size_t>(bytes.numel())},
         *optimizer_);
  } catch (const c10::Error& error) {
    load(before, *optimizer_);
    throw_invalid("{}: the state of {} does not match: {}", name(), describe(index),
                  error.what_without_backtrace());
  }
}

namespace detail {

double rate_of(const torch::optim::OptimizerOptions& options) {
  try {
    return options.get_lr();
  } catch (const c10::Error&) {  // these options have no learning rate
    return std::numeric_limits<double>::quiet_NaN();
  }
}

std::string to_bytes(const torch::optim::OptimizerOptions& options) {
  torch::serialize::OutputArchive archive;
  options.serialize(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}

void from_bytes(const std::string& bytes, torch::optim::OptimizerOptions& options) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  try {
    archive.load_from(in);
    options.serialize(archive);
  } catch (const c10::Error& error) {
    throw_invalid("cannot read the options of an optimizer of LibTorch: {}", error.what_without_backtrace());
  }
}

}  // namespace detail
}  // namespace torchspan::optim
