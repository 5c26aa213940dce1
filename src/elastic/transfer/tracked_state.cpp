#include "elastic/transfer/tracked_state.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

#include "checkpoint/api/source_names.h"
#include "elastic/transfer/received_state.h"
#include "elastic/transfer/state_listing.h"

namespace torchspan::elastic {

void TrackedState::add(std::string name, checkpoint::SourcePtr source) {
  const bool taken =
      std::any_of(sources_.begin(), sources_.end(), [&](const auto& one) { return one.first == name; });
  if (taken || name.empty()) {
    throw_invalid(
        fmt::format("an object was added to the elastic trainer under the {} name '{}': choose another",
                    taken ? "taken" : "empty", name));
  }
  for (const auto& [other, registered] : sources_)
    checkpoint::require_separate_names(name, *source, other, *registered);
  sources_.emplace_back(std::move(name), std::move(source));
}

void TrackedState::copy_from_first(const collective::Group& group, ElasticPosition& position) {
  const at::NoGradGuard no_grad;
  group.rank() == 0 ? send(group, position) : receive(group, position);
}

void TrackedState::send(const collective::Group& group, const ElasticPosition& position) const {
  checkpoint::StateWriter writer;
  for (const auto& [name, source] : sources_) {
    writer.set_prefix(name);
    source->save(writer);
  }
  StateListing listing{.position = position, .tensors = {}, .values = writer.values()};
  std::vector<at::Tensor> tensors;
  for (const checkpoint::StateTensor& entry : writer.tensors()) {
    tensors.push_back(entry.tensor.detach().resolve_conj().resolve_neg().cpu().contiguous());
    listing.tensors.push_back({entry.name, entry.tensor.scalar_type(), entry.tensor.sizes().vec()});
  }
  if (!writer.remote().empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' is a value on another worker: an elastic trainer copies local objects only",
                            writer.remote().front().first));
  }
  const Bytes bytes = listing.encode();
  at::Tensor size = at::empty({1}, at::kLong),
             header = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  size.fill_(header.numel());
  std::memcpy(header.data_ptr(), bytes.data(), bytes.size());
  std::vector<Future<at::Tensor>> sent{group.broadcast(size, 0), group.broadcast(header, 0)};
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) sent.push_back(group.broadcast(tensor, 0));
  }
  for (const auto& one : sent) one.wait();
}

void TrackedState::receive(const collective::Group& group, ElasticPosition& position) {
  at::Tensor size = at::empty({1}, at::kLong);
  group.broadcast(size, 0).wait();
  at::Tensor header = at::empty({size.item<std::int64_t>()}, at::kByte);
  group.broadcast(header, 0).wait();
  StateListing listing = StateListing::decode(
      {static_cast<const std::byte*>(header.data_ptr()), static_cast<std::size_t>(header.numel())});
  std::vector<at::Tensor> tensors;
  std::vector<Future<at::Tensor>> received;
  for (const StateListing::Entry& entry : listing.tensors) {
    tensors.push_back(at::empty(entry.shape, entry.dtype));
    if (tensors.back().numel() > 0) received.push_back(group.broadcast(tensors.back(), 0));
  }
  for (const auto& one : received) one.wait();
  const ElasticPosition theirs = listing.position;
  ReceivedState reader(std::move(listing), std::move(tensors));
  for (const auto& [name, source] : sources_) {
    reader.set_prefix(name);
    source->load(reader);
  }
  position = theirs;
}

}  // namespace torchspan::elastic
