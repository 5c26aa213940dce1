#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/sync_batch_norm.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/api/agreement.h"
#include "device/api/tensors.h"
#include "engine/api/node_ptr.h"
#include "state/api/place.h"

namespace torchspan {
namespace {

using collective::Group;
using torch::autograd::variable_list;

/// Statistics of all ranks' batches together, by feature, in double.
struct Statistics {
  double count = 0;  ///< values per feature
  at::Tensor mean;
  at::Tensor squares;  ///< sum of squared distances from the mean
};

/// All dimensions but the feature dimension.
std::vector<std::int64_t> other_dimensions(const at::Tensor& tensor) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t i = 2; i < tensor.dim(); ++i) dimensions.push_back(i);
  return dimensions;
}

/// Reshapes one value per feature so that it broadcasts over a tensor like `like`.
at::Tensor reshape_for(const at::Tensor& by_feature, const at::Tensor& like) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(like.dim()), 1);
  sizes[1] = like.size(1);
  return by_feature.to(like.scalar_type()).reshape(sizes);
}

void refuse_difference(const std::vector<at::Tensor>& gathered, std::size_t rank, const Group& group) {
  const std::int64_t one = gathered[0].size(0) / 2, other = gathered[rank].size(0) / 2;
  if (one == other) return;
  throw_invalid(
      "a SyncBatchNorm has {} features on rank {} and {} on rank {}: the ranks are in different layers, or "
      "have different models",
      one, group.ranks()[0], other, group.ranks()[rank]);
}

/// Gathers count, means and sums of squares from all ranks, and merges them as in Chan, Golub and LeVeque
/// (1983), in the order of ranks, so that all ranks get the same bits.
Statistics gather_statistics(const at::Tensor& input, const Group& group) {
  const std::int64_t features = input.size(1);
  const std::int64_t count = input.numel() / features;
  at::Tensor mine = at::zeros({1 + 2 * features}, input.options().dtype(at::kDouble).requires_grad(false));
  if (count > 0) {
    const auto [variance, mean] =
        at::var_mean(device::widened(input), other_dimensions(input), /*unbiased=*/false, /*keepdim=*/false);
    mine.narrow(0, 0, 1).fill_(static_cast<double>(count));
    mine.narrow(0, 1, features).copy_(mean);
    mine.narrow(0, 1 + features, features).copy_(variance).mul_(static_cast<double>(count));
  }
  const std::vector<at::Tensor> gathered = group.all_gather(mine).wait();
  for (std::size_t rank = 1; rank < gathered.size(); ++rank) refuse_difference(gathered, rank, group);
  const at::Tensor all = at::stack(gathered);
  const at::Tensor counts = all.narrow(1, 0, 1), means = all.narrow(1, 1, features);
  Statistics together;
  together.count = counts.sum().item<double>();
  together.mean = (means * counts).sum(0) / std::max(together.count, 1.0);
  together.squares = (all.narrow(1, 1 + features, features) + (means - together.mean).pow(2) * counts).sum(0);
  return together;
}

/// Backward of a batch norm. The gradient of the input uses sums over the batches of all ranks; those of
/// weight and bias are this rank's, as for any other parameter.
struct SyncBatchNormBackward final : engine::TensorNode {
  explicit SyncBatchNormBackward(Group of) : group(std::move(of)) {}

  variable_list apply(variable_list&& gradients) override {
    if (at::GradMode::is_enabled()) {
      throw Error(ErrorKind::kUnsupported,
                  "SyncBatchNorm has no second derivatives: run backward without create_graph");
    }
    const at::Tensor saved = input.unpack(), factors = weight.unpack();
    const at::Tensor x = device::widened(saved);
    const at::Tensor g = gradients[0].defined() ? device::widened(gradients[0]) : at::zeros_like(x);
    const at::Tensor distance = x - reshape_for(mean, x);
    const auto dimensions = other_dimensions(x);
    const at::Tensor sums =
        at::stack({g.sum(dimensions).to(at::kDouble), (g * distance).sum(dimensions).to(at::kDouble)});
    variable_list results(3);
    if (task_should_compute_output(1)) results[1] = (sums[1] * scale).to(factors.scalar_type());
    if (task_should_compute_output(2)) results[2] = sums[0].to(bias_dtype);
    const at::Tensor whole = group.all_reduce(sums.clone()).wait() / count;
    if (!task_should_compute_output(0)) return results;
    const at::Tensor outer = factors.defined() ? scale * factors.to(at::kDouble) : scale;
    results[0] = distance.mul_(reshape_for(-scale.pow(2) * whole[1], x))
                     .sub_(reshape_for(whole[0], x))
                     .add_(g)
                     .mul_(reshape_for(outer, x))
                     .to(saved.scalar_type());
    return results;
  }
  void release_variables() override {
    input.reset_data();
    weight.reset_data();
  }
  std::string name() const override { return "SyncBatchNormBackward"; }

  const Group group;
  torch::autograd::SavedVariable input, weight;
  at::ScalarType bias_dtype = at::kFloat;
  at::Tensor mean, scale;  ///< in double; scale is 1 / standard deviation
  double count = 0;
};

/// The batch norms of one rank's module: those to replace, and existing SyncBatchNorms.
struct Plan {
  struct Place {
    torch::nn::SequentialImpl* sequential;
    std::size_t index;
    std::string name;
    std::shared_ptr<torch::nn::Module> norm;
  };
  std::vector<Place> to_replace;
  std::map<const torch::nn::Module*, std::shared_ptr<SyncBatchNormImpl>>
      made;  ///< by the batch norm that each replaces
  std::vector<SyncBatchNormImpl*> there;
  data_parallel::Agreement agreement;
};

/// Features that are divided among tensor-parallel ranks, in words. FullyShardedDataParallel gathers its parts before the
/// forward.
std::string divided_features(const at::Tensor& weight) {
  const state::PlacePtr place = state::place_of(weight);
  const bool divided = place && std::ranges::any_of(place->among, [](const state::RanksPtr& ranks) {
                         return ranks->level() == state::kTensorParallel;
                       });
  return divided ? data_parallel::part_in_words(weight) : std::string();
}

std::string described(const torch::nn::BatchNormOptions& options, const at::Tensor& weight) {
  return fmt::format("a batch norm of {} features, eps {}, momentum {}, {}, {}{}", options.num_features(),
                     options.eps(), options.momentum() ? fmt::format("{}", *options.momentum()) : "none",
                     options.affine() ? fmt::format("with {} weights", c10::toString(weight.scalar_type()))
                                      : "without weights",
                     options.track_running_stats() ? "with running statistics" : "without running statistics",
                     divided_features(weight));
}

/// Makes a SyncBatchNorm from a batch norm; null if `module` is another module.
std::shared_ptr<SyncBatchNormImpl> synchronized_from(const torch::nn::Module& module) {
  if (const auto* one = dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*one);
  if (const auto* two = dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*two);
  if (const auto* three = dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module))
    return std::make_shared<SyncBatchNormImpl>(*three);
  return nullptr;
}

void make_plan(Plan& plan, torch::nn::Module& module, const std::string& path) {
  auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
  std::size_t index = 0;
  for (const auto& child : module.named_children()) {
    const std::size_t place = index++;
    const std::shared_ptr<torch::nn::Module>& held = child.value();
    if (!held) continue;
    const std::string name = path.empty() ? child.key() : path + "." + child.key();
    if (auto* sync = dynamic_cast<SyncBatchNormImpl*>(held.get())) {
      plan.there.push_back(sync);
      plan.agreement.tensors.push_back({name, described(sync->options, sync->weight)});
    } else if (const auto replacement = synchronized_from(*held)) {
      if (sequential == nullptr) {
        throw_invalid(
            "'{}' is a class member of type BatchNorm, which cannot be replaced; declare it as "
            "torchspan::SyncBatchNorm",
            name);
      }
      plan.made.emplace(held.get(), replacement);
      plan.to_replace.push_back({sequential, place, child.key(), held});
      plan.agreement.tensors.push_back({name, described(replacement->options, replacement->weight)});
    } else {
      make_plan(plan, *held, name);
    }
  }
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& options) : options(options) {
  reset();  // NOLINT(clang-analyzer-optin.cplusplus.VirtualCall): as LibTorch's modules do
}

void SyncBatchNormImpl::reset() {
  Parameters parameters;
  Buffers buffers;
  const std::int64_t features = options.num_features();
  if (options.affine()) parameters = {at::ones({features}), at::zeros({features})};
  if (options.track_running_stats())
    buffers = {at::zeros({features}), at::ones({features}), at::zeros({}, at::kLong)};
  if (parameters.weight.defined()) parameters.weight.requires_grad_(), parameters.bias.requires_grad_();
  adopt(parameters, buffers);
}

void SyncBatchNormImpl::adopt(const Parameters& parameters, const Buffers& buffers) {
  const auto parameter = [this](const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.defined() && tensor.requires_grad());
  };
  weight = parameter("weight", parameters.weight);
  bias = parameter("bias", parameters.bias);
  running_mean = register_buffer("running_mean", buffers.mean);
  running_var = register_buffer("running_var", buffers.var);
  num_batches_tracked = register_buffer("num_batches_tracked", buffers.batches);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format("torchspan::SyncBatchNorm({}, eps={}, affine={}, track_running_stats={}, {})",
                        options.num_features(), options.eps(), options.affine(),
                        options.track_running_stats(),
                        group_ ? fmt::format("over {} ranks", group_->size()) : "over this rank alone");
}

void SyncBatchNormImpl::check(const at::Tensor& input) const {
  if (input.dim() < 2 || input.size(1) != options.num_features()) {
    throw_invalid("SyncBatchNorm of {} features got {} [{}]; it takes [batch, {}, ...]",
                  options.num_features(), c10::toString(input.scalar_type()), fmt::join(input.sizes(), ", "),
                  options.num_features());
  }
  if (!input.is_floating_point()) {
    throw_invalid("SyncBatchNorm got {}; it takes real floats", c10::toString(input.scalar_type()));
  }
}

double SyncBatchNormImpl::count_batch() {
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) return 1 / num_batches_tracked.item<double>();
  }
  return options.momentum().value_or(0);
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  check(input);
  if (!synchronizes()) {
    const double momentum = count_batch();
    return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                     is_training() || !running_mean.defined(), momentum,
                                                     options.eps());
  }
  at::Tensor output;
  engine::NodePtrTo<SyncBatchNormBackward> node;
  {
    const at::NoGradGuard no_grad;
    const Statistics batch = gather_statistics(input, *group_);
    if (batch.count == 1) {
      throw_invalid(
          "SyncBatchNorm got one value per feature from all ranks together; training needs at least two");
    }
    const double count = std::max(batch.count, 1.0);
    const at::Tensor scale = (batch.squares / count + options.eps()).rsqrt();
    if (running_mean.defined() && batch.count > 0) {
      const double part = count_batch();
      running_mean.copy_(running_mean.to(at::kDouble) * (1 - part) + batch.mean * part);
      running_var.copy_(running_var.to(at::kDouble) * (1 - part) + batch.squares * (part / (count - 1)));
    }
    const at::Tensor x = device::widened(input);
    const at::Tensor factor = weight.defined() ? scale * weight : scale;
    const at::Tensor shift = bias.defined() ? bias - batch.mean * factor : -batch.mean * factor;
    output = at::empty_like(x);
    at::addcmul_out(output, reshape_for(shift, x), x, reshape_for(factor, x));
    output = output.to(input.scalar_type());
    node = engine::make_node<SyncBatchNormBackward>(*group_);
    node->mean = batch.mean;
    node->scale = scale;
    node->count = count;
    if (bias.defined()) node->bias_dtype = bias.scalar_type();
  }
  if (!torch::autograd::compute_requires_grad(input, weight, bias)) return output;
  node->input = torch::autograd::SavedVariable(input, /*is_output=*/false);
  node->weight = torch::autograd::SavedVariable(weight, /*is_output=*/false);
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  torch::autograd::create_gradient_edge(output, node);
  return output;
}

std::size_t convert_sync_batch_norm(torch::nn::Module& module, const Group& group) {
  Plan plan;
  try {
    if (synchronized_from(module)) {
      throw_invalid(
          "the module is itself a BatchNorm, which cannot be replaced; construct a torchspan::SyncBatchNorm "
          "from it");
    }
    if (auto* sync = dynamic_cast<SyncBatchNormImpl*>(&module)) {
      plan.there.push_back(sync);
      plan.agreement.tensors.push_back({"the module", described(sync->options, sync->weight)});
    } else {
      make_plan(plan, module, "");
    }
  } catch (const Error& error) {
    plan.agreement.failure = error.message();
  }
  data_parallel::agree(group, plan.agreement, "batch norms");
  const Group own = group.split(0, group.rank());
  for (SyncBatchNormImpl* norm : plan.there) norm->set_group(own);
  for (const Plan::Place& place : plan.to_replace) {
    const auto& replacement = plan.made.at(place.norm.get());
    replacement->set_group(own);
    *(place.sequential->begin() + static_cast<std::ptrdiff_t>(place.index)) =
        torch::nn::AnyModule(replacement);
    place.sequential->replace_module(place.name, replacement);
  }
  return plan.agreement.tensors.size();
}

}  // namespace torchspan
