#include "data_parallel/module/module_parts.h"

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
  Names sparse(options.sparse_parameters.begin(), options.sparse_parameters.end());
  sparse.merge(sparse_embeddings(module));
  const Names ignored(options.ignored_parameters.begin(), options.ignored_parameters.end());
  Names known;
  std::set<const c10::TensorImpl*> seen;
  ModuleParts parts;
  for (const auto& item : module.named_parameters()) {
    known.insert(item.key());
    if (ignored.count(item.key()) > 0 || !item.value().defined()) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    parts.parameters.push_back({item.key(), item.value(), sparse.count(item.key()) > 0});
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

}  // namespace torchspan::data_parallel
