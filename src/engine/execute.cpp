#include "engine/execute.h"

#include <algorithm>
#include <fmt/format.h>
#include <sstream>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "core/api/throw_invalid.h"
#include "engine/api/compat.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::engine {
namespace {

bool is_plain_dense(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !at::isTensorSubclassLike(tensor);
}

/// Whether the indices or values of a sparse tensor have two handles, its and this one, and no other view.
bool part_is_unshared(const at::Tensor& part) {
  return part.use_count() == 2 && part.storage().use_count() == 1 && part.is_contiguous();
}

/// isTensorSubclassLike() returns true for every sparse tensor.
bool is_plain_sparse(const at::Tensor& tensor) {
  const auto others = at::kTensorSubclassLike - c10::DispatchKeySet(c10::DispatchKey::Sparse);
  return tensor.layout() == at::kSparse && (tensor.key_set() & others).empty();
}

/// Copies the parts of `gradient` that have other owners: an embedding's gradient has its input as indices.
at::Tensor adopt_sparse(at::Tensor gradient) {
  if (gradient.use_count() != 1 || !is_plain_sparse(gradient)) return gradient.clone();
  const at::SparseTensorImpl& sparse = compat::sparse_impl(gradient);
  const bool own_indices = part_is_unshared(sparse.indices()), own_values = part_is_unshared(sparse.values());
  if (own_indices && own_values) return gradient;
  const at::Tensor indices = own_indices ? sparse.indices() : sparse.indices().clone();
  const at::Tensor values = own_values ? sparse.values() : sparse.values().clone();
  return at::_sparse_coo_tensor_unsafe(indices, values, gradient.sizes(), gradient.options())
      ._coalesced_(gradient.is_coalesced());
}

bool can_take_in_place(const at::Tensor& held, const at::Tensor& incoming) {
  if (!is_unshared(held) || !held.is_non_overlapping_and_dense()) return false;
  if (held.scalar_type() != incoming.scalar_type() || !held.sizes().equals(incoming.sizes())) return false;
  return is_plain_dense(incoming) || (incoming.is_sparse() && held.is_contiguous());
}

}  // namespace

bool is_unshared(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && is_plain_dense(tensor) && !tensor._is_zerotensor() &&
         tensor.has_storage() && tensor.storage().use_count() == 1;
}

at::Tensor add_into(at::Tensor& held, at::Tensor& incoming) {
  const bool turned = held.is_sparse() && !incoming.is_sparse();
  at::Tensor& base = turned ? incoming : held;
  at::Tensor& other = turned ? held : incoming;
  if (!can_take_in_place(base, other)) {
    at::Tensor sum = base + other;
    std::swap(held, sum);
    return sum;
  }
  base.add_(other);
  if (turned) std::swap(held, incoming);
  return {};
}

at::Tensor sum_of(at::Tensor held, at::Tensor gradient) {
  // LibTorch adds the sum so far to a new sparse gradient; the order determines the last bits.
  if (held.is_sparse() && gradient.is_sparse()) std::swap(held, gradient);
  add_into(held, gradient);
  return held;
}

at::Tensor adopt_gradient(const at::Tensor& parameter, at::Tensor gradient) {
  namespace utils = torch::autograd::utils;
  if (gradient.is_sparse()) return adopt_sparse(std::move(gradient));
  if (!is_plain_dense(gradient) || !is_plain_dense(parameter)) return gradient.clone();
  if (is_unshared(gradient) && utils::obeys_layout_contract(gradient, parameter)) return gradient.detach();
  return utils::clone_obey_contract(gradient, parameter);
}

namespace {

using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::variable_list;

template <class T>
std::string printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

[[noreturn]] void refuse(std::size_t index, const std::string& what) {
  throw_invalid("invalid gradient at index {}: {}", index, what);
}

bool layouts_fit(at::Layout gradient, at::Layout expected) {
  if (gradient == expected || gradient == at::kSparse) return true;
  const bool sparse = expected == at::kSparse || expected == at::kSparseCsr || expected == at::kSparseCsc ||
                      expected == at::kSparseBsr || expected == at::kSparseBsc;
  return sparse && gradient == at::kStrided;
}

void fit_dtype(std::size_t index, const InputMetadata& metadata, at::Tensor& gradient) {
  const at::ScalarType input = c10::typeMetaToScalarType(metadata.dtype());
  const at::ScalarType got = gradient.scalar_type();
  if (!c10::isFloatingType(got) && c10::isComplexType(input) != c10::isComplexType(got)) {
    refuse(index, fmt::format("its type is {}, expected {}", c10::toString(got), c10::toString(input)));
  }
  const std::optional<at::ScalarType> expected = compat::gradient_dtype(metadata);
  if (expected && got != *expected) gradient = gradient.to(*expected);
}

void fit_device(std::size_t index, const InputMetadata& metadata, at::Tensor& gradient) {
  if (gradient.device() == metadata.device() || metadata.is_tensor_subclass()) return;
  if (gradient.dim() != 0) {
    refuse(index, fmt::format("it is on {}, expected {}", gradient.device().str(), metadata.device().str()));
  }
  gradient = gradient.to(metadata.device());
}

void fit(std::size_t index, const InputMetadata& metadata, at::Tensor& gradient) {
  if (!metadata.is_same_shape(gradient)) {
    if (!metadata.is_expandable_to_shape(gradient)) {
      throw_invalid(metadata.incompatible_shape_error_message(index, gradient).str());
    }
    gradient = metadata.reduce_grad(gradient);
  }
  fit_dtype(index, metadata, gradient);
  if (!layouts_fit(gradient.layout(), metadata.layout())) {
    refuse(index, fmt::format("its layout is {}, expected {}", printed(gradient.layout()),
                              printed(metadata.layout())));
  }
  fit_device(index, metadata, gradient);
}

void check_for_nan(const variable_list& gradients) {
  for (std::size_t index = 0; index < gradients.size(); ++index) {
    if (gradients[index].defined() && gradients[index].isnan().any().item<bool>()) {
      refuse(index, "it has nan values (found by anomaly detection)");
    }
  }
}

/// Calls a node's pre-hook. A PassHook gets the sink.
auto pre_hook_caller(GradientSink& sink) {
  return [&sink](torch::autograd::FunctionPreHook& hook, const variable_list& gradients) {
    auto* ours = dynamic_cast<PassHook*>(&hook);
    if (ours == nullptr) return hook(gradients);
    ours->pass_arrives(sink);
    return gradients;
  };
}

bool is_gradient_hook(const std::unique_ptr<torch::autograd::FunctionPostHook>& hook) {
  return dynamic_cast<GradientHook*>(hook.get()) != nullptr;
}

/// Whether the sink accumulated the gradient.
bool give_to_sink(const torch::autograd::AccumulateGrad& node, at::Tensor gradient, GradientSink& sink) {
  if (!gradient.defined()) return false;
  if (node.variable.grad_fn()) {
    throw_invalid(
        "this leaf was changed in place after it was used, so it is no longer a leaf; change it under "
        "NoGradGuard, or change a copy");
  }
  if (!node.variable.requires_grad()) return false;
  gradient = compat::run_leaf_hooks(node, std::move(gradient));
  if (!gradient.defined()) return false;
  sink.accumulate(node.variable, std::move(gradient));
  return true;
}

/// Removes edges of a node while it lives: LibTorch's nodes compute no gradient for an edge that leads nowhere.
class EdgeMask {
 public:
  EdgeMask(Node& node, const std::vector<bool>& wanted) : edges_(node.next_edges()) {
    for (std::size_t edge = 0; edge < edges_.size(); ++edge) {
      if (!wanted[edge]) removed_.emplace_back(edge, std::exchange(edges_[edge], {}));
    }
  }
  ~EdgeMask() {
    for (auto& [edge, value] : removed_) edges_[edge] = std::move(value);
  }
  EdgeMask(const EdgeMask&) = delete;
  EdgeMask& operator=(const EdgeMask&) = delete;

 private:
  torch::autograd::edge_list& edges_;
  std::vector<std::pair<std::size_t, torch::autograd::Edge>> removed_;
};

void check_outputs(const variable_list& outputs) {
  if (torch::autograd::AnomalyMode::is_enabled() && torch::autograd::AnomalyMode::should_check_nan())
    check_for_nan(outputs);
}

}  // namespace

void fit_gradients(const torch::autograd::edge_list& edges, variable_list& gradients) {
  if (gradients.size() != edges.size()) {
    throw_invalid("invalid number of gradients: {}, expected {}", gradients.size(), edges.size());
  }
  for (std::size_t index = 0; index < edges.size(); ++index) {
    const auto& edge = edges[index];
    if (!edge.is_valid() || !gradients[index].defined()) continue;
    if (edge.input_nr >= edge.function->num_inputs()) continue;  // the node has no metadata for this input
    fit(index, edge.function->input_metadata(edge.input_nr), gradients[index]);
  }
}

variable_list run_node(Node& node, variable_list inputs, GradientSink& sink, bool retain) {
  inputs = compat::run_pre_hooks(node, std::move(inputs), pre_hook_caller(sink));
  if (!retain) node.will_release_variables();
  const bool hooked = !node.post_hooks().empty();
  const variable_list seen = hooked ? inputs : variable_list();
  variable_list outputs = node(std::move(inputs));
  fit_gradients(node.next_edges(), outputs);
  for (const auto& hook : node.post_hooks()) outputs = (*hook)(outputs, seen);
  if (outputs.size() != node.next_edges().size()) {
    throw_invalid("a post hook returned {} gradients instead of {}", outputs.size(),
                  node.next_edges().size());
  }
  if (!retain) node.release_variables();
  check_outputs(outputs);
  return outputs;
}

variable_list run_pre_hooks(Node& node, variable_list inputs, GradientSink& sink) {
  return compat::run_pre_hooks(node, std::move(inputs), pre_hook_caller(sink));
}

variable_list run_edges(Node& node, variable_list inputs, const std::vector<bool>& wanted, bool retain) {
  if (!retain) node.will_release_variables();
  variable_list outputs;
  {
    const EdgeMask mask(node, wanted);
    outputs = node(std::move(inputs));
  }
  outputs.resize(node.next_edges().size());
  for (std::size_t edge = 0; edge < outputs.size(); ++edge) {
    if (!wanted[edge]) outputs[edge] = at::Tensor();  // a node may compute it all the same
  }
  fit_gradients(node.next_edges(), outputs);
  if (!retain) node.release_variables();
  check_outputs(outputs);
  return outputs;
}

void run_pass_node(PassNode& node, variable_list inputs, const std::vector<bool>& reached,
                   GradientSink& sink) {
  const auto call = pre_hook_caller(sink);
  inputs = compat::run_pre_hooks(node, std::move(inputs),
                                 [&](torch::autograd::FunctionPreHook& hook, const variable_list& gradients) {
                                   const auto input = compat::input_of(hook);
                                   const bool skipped = input && *input < reached.size() && !reached[*input];
                                   return skipped ? gradients : call(hook, gradients);
                                 });
  const variable_list seen = node.post_hooks().empty() ? variable_list() : inputs;
  {
    at::RecordFunction record(at::RecordScope::BACKWARD_FUNCTION);  // as Node::operator() does
    if (record.isActive()) record.before(node.name(), static_cast<std::int64_t>(node.sequence_nr()));
    node.run(std::move(inputs), sink);
  }
  for (const auto& hook : node.post_hooks()) (*hook)({}, seen);
}

void run_leaf(torch::autograd::AccumulateGrad& node, variable_list inputs, GradientSink& sink) {
  inputs = compat::run_pre_hooks(node, std::move(inputs), pre_hook_caller(sink));
  if (inputs.size() != 1) {
    throw_invalid("a leaf takes one gradient, got {}", inputs.size());
  }
  const auto& hooks = node.post_hooks();
  const bool others = sink.runs_leaf_hooks() && !std::all_of(hooks.begin(), hooks.end(), is_gradient_hook);
  const variable_list seen = others ? inputs : variable_list();
  const bool accumulated = give_to_sink(node, std::move(inputs[0]), sink);
  if (sink.writes_grad_field()) compat::run_post_accumulate_hook(node, accumulated);
  for (const auto& hook : hooks) {
    if (auto* ours = dynamic_cast<GradientHook*>(hook.get())) {
      ours->gradient_ready(sink, node.variable);
    } else if (others) {
      (*hook)({}, seen);
    }
  }
}

Error name_failure(const std::string& node, const std::exception_ptr& cause) {
  Error error = to_error(cause);
  try {
    std::rethrow_exception(cause);
  } catch (const c10::Error& kernel_error) {
    error = Error(ErrorKind::kInvalid, kernel_error.what_without_backtrace());
  } catch (...) {
  }
  Error named(error.kind(), fmt::format("the backward pass failed in node '{}': {}", node, error.message()));
  named.with_worker(error.worker()).with_call(error.call()).with_elapsed(error.elapsed());
  for (const RemoteFrame& frame : error.frames()) named.with_frame(frame);
  return named;
}

}  // namespace torchspan::engine
