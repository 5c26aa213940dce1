#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/rpc/value.h>
#include <torchspan/pipeline/batch.h>
#include <torchspan/pipeline/layers.h>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {

Batch& Batch::mark_unsplit(std::size_t member) {
  if (unsplit.size() <= member) unsplit.resize(member + 1);
  unsplit[member] = 1;
  return *this;
}

void batch_detail::refuse(const char* wanted, const c10::IValue& there) {
  throw_invalid("the layer takes {}, but its input is {}", wanted,
                there.isNone() ? "nothing (None)" : "a value of type " + there.tagKind());
}

const at::Tensor& Batch::tensor() const {
  if (members.size() != 1 || !members.front().isTensor()) {
    throw_invalid("expected a single tensor; the batch has {} members", members.size());
  }
  return members.front().toTensor();
}

void Skips::stash(const std::string& name, at::Tensor value) {
  const auto declared = std::find(may_stash_.begin(), may_stash_.end(), name);
  if (declared == may_stash_.end()) {
    throw_invalid(
        "skip '{}' is stashed but was not declared by stashes(\"{}\"), or is stashed for the second time",
        name, name);
  }
  may_stash_.erase(declared);
  stashed_.emplace(name, std::move(value));
}

at::Tensor Skips::pop(const std::string& name) {
  auto found = incoming_.find(name);
  if (found == incoming_.end()) {
    throw_invalid(
        "skip '{}' is popped but was not declared by pops(\"{}\"), or is popped for the second time", name,
        name);
  }
  at::Tensor value = std::move(found->second);
  incoming_.erase(found);
  return value;
}

std::string Skips::unused_keys() const {
  std::vector<std::string> texts;
  for (const std::string& name : may_stash_)
    texts.push_back(fmt::format("'{}' was declared by stashes() but not stashed", name));
  for (const auto& [name, value] : incoming_)
    texts.push_back(fmt::format("'{}' was declared by pops() but not popped", name));
  return fmt::format("{}", fmt::join(texts, "; "));
}

namespace layers_detail {

std::string type_name(const std::type_info& type) { return rpc::demangle(type); }

void append_tensors(std::vector<at::Tensor>& all, const torch::nn::Module* module) {
  if (module == nullptr) return;
  for (const at::Tensor& parameter : module->parameters()) all.push_back(parameter);
  for (const at::Tensor& buffer : module->buffers()) all.push_back(buffer);
}

}  // namespace layers_detail
}  // namespace torchspan::pipeline
