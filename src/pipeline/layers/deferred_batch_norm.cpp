
#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/functional/batchnorm.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/deferred_batch_norm.h>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {
namespace {

/// All dimensions except the second one, the channels.
std::vector<std::int64_t> reduced_dimensions(const at::Tensor& input) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

}  // namespace

DeferredBatchNormImpl::DeferredBatchNormImpl(torch::nn::BatchNormOptions given) : options(std::move(given)) {
  reset();
}

DeferredBatchNormImpl::DeferredBatchNormImpl(const torch::nn::BatchNormOptions& given, const State& state)
    : options(given) {
  // register_parameter() sets requires_grad: a frozen parameter must stay frozen.
  const auto learns = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  weight = register_parameter("weight", state.weight, learns(state.weight));
  bias = register_parameter("bias", state.bias, learns(state.bias));
  running_mean = register_buffer("running_mean", state.running_mean);
  running_var = register_buffer("running_var", state.running_var);
  num_batches_tracked = register_buffer("num_batches_tracked", state.num_batches_tracked);
}

void DeferredBatchNormImpl::reset() {
  const std::int64_t channels = options.num_features();
  const bool affine = options.affine();
  weight = register_parameter("weight", affine ? at::ones({channels}) : at::Tensor(), affine);
  bias = register_parameter("bias", affine ? at::zeros({channels}) : at::Tensor(), affine);
  const bool tracks = options.track_running_stats();
  running_mean = register_buffer("running_mean", tracks ? at::zeros({channels}) : at::Tensor());
  running_var = register_buffer("running_var", tracks ? at::ones({channels}) : at::Tensor());
  num_batches_tracked =
      register_buffer("num_batches_tracked", tracks ? at::tensor(0, at::kLong) : at::Tensor());
}

at::Tensor DeferredBatchNormImpl::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.dim() > 5) {
    TORCH_CHECK(false, "DeferredBatchNorm takes inputs of 2 to 5 dimensions, channels second, not of ",
                input.dim());
  }
  if (is_training() && running_mean.defined() && !repeated_) {
    gather(input);
    if (order_ < 0) end_step(true);
  }
  namespace F = torch::nn::functional;
  // Normalizes with the statistics of the batch and leaves the running ones unchanged.
  const bool own = is_training() || !running_mean.defined();
  return F::detail::batch_norm(input, own ? at::Tensor() : running_mean, own ? at::Tensor() : running_var,
                               weight, bias, own, 0.0, options.eps());
}

void DeferredBatchNormImpl::begin_use(int order, bool repeated) {
  order_ = order;
  repeated_ = repeated;
}

void DeferredBatchNormImpl::gather(const at::Tensor& input) {
  const torch::autograd::AutoGradMode mode(false);
  const at::Tensor values = input.detach().to(at::kDouble);
  const auto dimensions = reduced_dimensions(values);
  const double count = static_cast<double>(values.numel()) / static_cast<double>(values.size(1));
  const at::Tensor mean = values.mean(dimensions, true);
  const at::Tensor spread = (values - mean).square().sum(dimensions);
  merge(order_, {count, mean.reshape({-1}), spread});
}

/// Merges the moments of two sets without cancellation (Chan, Golub and LeVeque, 1979).
void DeferredBatchNormImpl::merge(int order, const Moments& more) {
  Moments& moments = gathered_[order];
  if (moments.count == 0) {
    moments = more;
    return;
  }
  const at::Tensor apart = more.mean - moments.mean;
  const double total = moments.count + more.count;
  moments.mean = moments.mean + apart * (more.count / total);
  moments.squared_spread =
      moments.squared_spread + more.squared_spread + apart.square() * (moments.count * more.count / total);
  moments.count = total;
}

std::vector<at::Tensor> DeferredBatchNormImpl::gathered() const {
  std::vector<at::Tensor> all;
  for (const auto& [order, moments] : gathered_) {
    all.push_back(at::tensor({static_cast<double>(order), moments.count}, at::kDouble));
    all.push_back(moments.mean);
    all.push_back(moments.squared_spread);
  }
  return all;
}

void DeferredBatchNormImpl::set_gathered(const std::vector<std::vector<at::Tensor>>& by_replica) {
  const torch::autograd::AutoGradMode mode(false);
  gathered_.clear();
  for (const auto& replica : by_replica) {
    for (std::size_t i = 0; i + 2 < replica.size(); i += 3) {
      const auto is_row = [](const at::Tensor& tensor, std::int64_t size) {
        return tensor.defined() && tensor.dim() == 1 && tensor.size(0) == size &&
               tensor.scalar_type() == at::kDouble;
      };
      const bool valid = is_row(replica[i], 2) && is_row(replica[i + 1], options.num_features()) &&
                         is_row(replica[i + 2], options.num_features());
      TORCH_CHECK(valid, "a replica of this DeferredBatchNorm gathered moments of other channels");
      const auto* head = replica[i].data_ptr<double>();
      const at::Device device = running_mean.device();
      merge(static_cast<int>(head[0]), {head[1], replica[i + 1].to(device), replica[i + 2].to(device)});
    }
  }
}

void DeferredBatchNormImpl::commit(const Moments& moments) {
  const torch::autograd::AutoGradMode mode(false);
  num_batches_tracked.add_(1);
  const double share = options.momentum() ? *options.momentum() : 1.0 / num_batches_tracked.item<double>();
  const at::Tensor variance = moments.squared_spread / (moments.count - 1);
  running_mean.mul_(1 - share).add_(moments.mean.to(running_mean.dtype()), share);
  running_var.mul_(1 - share).add_(variance.to(running_var.dtype()), share);
}

void DeferredBatchNormImpl::end_step(bool succeeded) {
  if (succeeded) {
    for (const auto& [order, moments] : gathered_) commit(moments);
  }
  gathered_.clear();
  order_ = -1;
  repeated_ = false;
}

namespace {

/// Returns the replacement of `module`; null if it is not a batch norm.
std::shared_ptr<DeferredBatchNormImpl> substitute(const std::shared_ptr<torch::nn::Module>& module) {
  namespace nn = torch::nn;
  if (auto one = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(module))
    return convert_deferred_batch_norm(nn::BatchNorm1d(one)).ptr();
  if (auto two = std::dynamic_pointer_cast<nn::BatchNorm2dImpl>(module))
    return convert_deferred_batch_norm(nn::BatchNorm2d(two)).ptr();
  if (auto three = std::dynamic_pointer_cast<nn::BatchNorm3dImpl>(module))
    return convert_deferred_batch_norm(nn::BatchNorm3d(three)).ptr();
  return nullptr;
}

/// Throws if the block has a norm that needs conversion: its code calls the norm by its C++ type.
void refuse_norms_inside(const std::string& name, const torch::nn::Module& block) {
  for (const auto& inner : block.named_modules("", false)) {
    const auto norm = substitute(inner.value());
    if (!norm || !norm->running_mean.defined())
      continue;  // a norm without running statistics needs no conversion
    throw_invalid(
        "'{}' of module '{}' ({}) cannot be converted: the module calls it by its type, {}. Declare it there "
        "as torchspan::pipeline::DeferredBatchNorm, whose parameters and buffers have the same names, or "
        "convert a Sequential inside the module and put it back with Module::replace_module()",
        inner.key(), name, block.name(), inner.value()->name());
  }
}

}  // namespace

torch::nn::Sequential convert_deferred_batch_norm(const torch::nn::Sequential& modules) {
  torch::nn::Sequential converted;
  // Before the modules are added, so that each keeps its mode.
  converted->train(modules->is_training());
  const auto children = modules->named_children();
  std::size_t index = 0;
  for (auto module = modules->begin(); module != modules->end(); ++module, ++index) {
    std::string name = children[index].key();
    const auto pointer = module->ptr();
    if (auto norm = substitute(pointer)) {
      converted->push_back(std::move(name), torch::nn::AnyModule(std::move(norm)));
    } else {
      refuse_norms_inside(name, *pointer);
      converted->push_back(std::move(name), *module);
    }
  }
  return converted;
}

}  // namespace torchspan::pipeline
