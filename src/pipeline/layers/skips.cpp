#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/layers.h>

namespace torchspan::pipeline {

void Skips::stash(const std::string& name, at::Tensor value) {
  const auto declared = std::find(may_stash_.begin(), may_stash_.end(), name);
  if (declared == may_stash_.end()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("skip '{}' is stashed but was not declared by stashes(\"{}\"), or is "
                            "stashed for the second time",
                            name, name));
  }
  may_stash_.erase(declared);
  stashed_.emplace(name, std::move(value));
}

at::Tensor Skips::pop(const std::string& name) {
  auto found = incoming_.find(name);
  if (found == incoming_.end()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("skip '{}' is popped but was not declared by pops(\"{}\"), or is "
                            "popped for the second time",
                            name, name));
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

}  // namespace torchspan::pipeline
