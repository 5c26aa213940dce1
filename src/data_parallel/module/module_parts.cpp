#include "data_parallel/module/module_parts.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <torch/nn/modules/embedding.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

using Names = std::set<std::string>;

/// Names of the weights of embeddings with the option sparse(true).
Names sparse_embeddings(const torch::nn::Module& module) {
  Names names;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const auto note = [&](const auto* embedding) {
      if (embedding && embedding->options.sparse())
        names.insert(item.key().empty() ? "weight" : item.key() + ".weight");
    };
    note(dynamic_cast<const torch::nn::EmbeddingImpl*>(item.value().get()));
    note(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(item.value().get()));
  }
  return names;
}

/// Parameters whose gradients are sparse. The sum of the gradients of a sparse embedding and of another module that
/// shares its weight is dense, so such a weight is not one of them unless the options name it.
std::set<const c10::TensorImpl*> sparse_parameters(const torch::nn::Module& module,
                                                   const std::vector<std::string>& chosen) {
  const Names embeddings = sparse_embeddings(module);
  std::set<const c10::TensorImpl*> sparse, dense;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined()) continue;
    const auto* impl = item.value().unsafeGetTensorImpl();
    embeddings.count(item.key()) > 0 ? sparse.insert(impl) : dense.insert(impl);
  }
  for (const auto* impl : dense) sparse.erase(impl);
  for (const auto& item : module.named_parameters()) {
    if (std::find(chosen.begin(), chosen.end(), item.key()) != chosen.end() && item.value().defined())
      sparse.insert(item.value().unsafeGetTensorImpl());
  }
  return sparse;
}

void refuse_unknown(const Names& known, const std::vector<std::string>& names, const char* option) {
  for (const std::string& name : names) {
    if (known.count(name) > 0) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("{} has '{}', but the module has no parameter or buffer of that name", option, name));
  }
}

}  // namespace

ModuleParts parts_of(const torch::nn::Module& module, const DataParallelOptions& options) {
  const std::set<const c10::TensorImpl*> sparse = sparse_parameters(module, options.sparse_parameters);
  const Names ignored(options.ignored_parameters.begin(), options.ignored_parameters.end());
  Names known;
  std::set<const c10::TensorImpl*> seen;
  ModuleParts parts;
  for (const auto& item : module.named_parameters()) {
    known.insert(item.key());
    if (ignored.count(item.key()) > 0 || !item.value().defined()) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const bool is_sparse = sparse.count(item.value().unsafeGetTensorImpl()) > 0;
    parts.parameters.push_back({item.key(), item.value(), is_sparse});
  }
  for (const auto& item : module.named_buffers()) {
    known.insert(item.key());
    if (ignored.count(item.key()) > 0 || !item.value().defined()) continue;
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parts.buffers.emplace_back(item.key(), item.value());
  }
  refuse_unknown(known, options.ignored_parameters, "ignored_parameters");
  refuse_unknown(known, options.sparse_parameters, "sparse_parameters");
  return parts;
}

void mark_own(const torch::nn::Module& module, const DataParallelOptions& options,
              const state::RanksPtr& ranks) {
  const Names ignored(options.ignored_parameters.begin(), options.ignored_parameters.end());
  const auto mark = [&](const at::Tensor& tensor, bool own, bool exchangeable) {
    if (!tensor.defined()) return;
    const state::PlacePtr before = state::place_of(tensor);
    if (!own && (!before || !before->own)) return;
    state::Place place = before ? *before : state::Place();
    if (place.own) place.among.erase(place.among.begin());  // of an earlier wrapper
    if (own) place.among.insert(place.among.begin(), ranks);
    place.own = own;
    place.exchangeable = exchangeable;
    const bool has_any = own || place.divided || !place.among.empty();
    state::set_place(tensor, has_any ? std::make_shared<state::Place>(std::move(place)) : nullptr);
  };
  for (const auto& item : module.named_parameters()) mark(item.value(), ignored.contains(item.key()), false);
  for (const auto& item : module.named_buffers())
    mark(item.value(), !options.broadcast_buffers || ignored.contains(item.key()), true);
}

}  // namespace torchspan::data_parallel
