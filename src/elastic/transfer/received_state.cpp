#include "elastic/transfer/received_state.h"

#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::elastic {

ReceivedState::ReceivedState(StateListing listing, std::vector<at::Tensor> tensors)
    : listing_(std::move(listing)) {
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tensors_.emplace(listing_.tensors[i].name, std::move(tensors[i]));
}

std::vector<std::string> ReceivedState::all_names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const at::Tensor& ReceivedState::get(const std::string& full_name) const {
  const auto found = tensors_.find(full_name);
  if (found == tensors_.end()) throw_invalid(fmt::format("{} has no tensor '{}'", describe(), full_name));
  return found->second;
}

void ReceivedState::read_box(const std::string& full_name, const at::Tensor& target,
                             const std::vector<std::int64_t>& offset) const {
  at::Tensor part = get(full_name);
  for (std::size_t dim = 0; dim < offset.size(); ++dim) {
    const auto place = static_cast<std::int64_t>(dim);
    part = part.narrow(place, offset[dim], target.size(place));
  }
  const at::NoGradGuard no_grad;
  at::Tensor(target).copy_(part);
}

const checkpoint::Value* ReceivedState::find_value(const std::string& full_name) const {
  const auto found = listing_.values.find(full_name);
  return found == listing_.values.end() ? nullptr : &found->second;
}

void ReceivedState::read_on_owner(const std::string& full_name, const checkpoint::RemoteValue&) const {
  throw Error(ErrorKind::kUnsupported,
              fmt::format("'{}' is a value on another worker: an elastic trainer copies local objects only",
                          full_name));
}

}  // namespace torchspan::elastic
