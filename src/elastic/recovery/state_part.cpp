#include "elastic/recovery/state_part.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <torchspan/core/error.h>

#include "elastic/transfer/received_state.h"

namespace torchspan::elastic {
namespace {

std::int64_t aligned_part(std::int64_t bytes) {
  return (bytes + StatePart::kAlignment - 1) / StatePart::kAlignment * StatePart::kAlignment;
}

void make_room(at::Tensor& tensor, std::int64_t bytes) {
  if (!tensor.defined() || tensor.numel() != bytes) {
    tensor = at::Tensor();  // before the new memory is allocated
    tensor = at::empty({bytes}, at::kByte);
  }
}

/// The bytes of `data` from `begin` as a tensor; they share memory.
at::Tensor viewed(const at::Tensor& data, std::int64_t begin, const StateListing::Entry& entry,
                  std::int64_t bytes) {
  if (bytes == 0) return at::empty(entry.shape, entry.dtype);
  return data.narrow(0, begin, bytes).view(entry.dtype).view(entry.shape);
}

/// Bytes of an entry, or an Error: listings come from other ranks.
std::int64_t bytes_of_entry(const StateListing::Entry& entry, std::int64_t most) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  for (const std::int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) bytes = most + 1;
    if (bytes > most) break;
  }
  if (bytes > most)
    throw_invalid(fmt::format("the copy of a state lacks a part of the tensor '{}'", entry.name));
  return bytes;
}

void check_local(const checkpoint::StateWriter& writer) {
  const std::string advice =
      "set RecoveryOptions::steps_per_copy to 0, so that it is restored from checkpoints only";
  if (!writer.remote().empty()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' is a value on another worker, of which no copies in memory are made: {}",
                            writer.remote().front().first, advice));
  }
  for (const checkpoint::StateTensor& entry : writer.tensors()) {
    if (entry.tensor.sizes().vec() == entry.shape) continue;
    throw Error(ErrorKind::kUnsupported,
                fmt::format("'{}' is a part of a tensor, of which no copies in memory are made: {}",
                            entry.name, advice));
  }
}

}  // namespace

void StatePart::take(const CopyId& of, const NamedSources& sources) {
  checkpoint::StateWriter writer;
  for (const auto& [name, source] : sources) {
    writer.set_prefix(name);
    source->save(writer);
  }
  check_local(writer);
  StateListing listing{
      .position = {.step = of.step, .epoch = 0, .next = 0}, .tensors = {}, .values = writer.values()};
  std::int64_t total = 0;
  for (const checkpoint::StateTensor& entry : writer.tensors()) {
    listing.tensors.push_back({entry.name, entry.tensor.scalar_type(), entry.tensor.sizes().vec()});
    total += aligned_part(static_cast<std::int64_t>(entry.tensor.nbytes()));
  }
  const Bytes bytes = listing.encode();
  header = at::Tensor();  // no copy exists while its data is written
  make_room(data, total);
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < listing.tensors.size(); ++i) {
    const at::Tensor& tensor = writer.tensors()[i].tensor;
    const auto size = static_cast<std::int64_t>(tensor.nbytes());
    if (size > 0) viewed(data, at, listing.tensors[i], size).copy_(tensor);
    at += aligned_part(size);
  }
  id = of;
  at::Tensor text = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(text.data_ptr(), bytes.data(), bytes.size());
  header = text;
}

void StatePart::expect(const CopyId& of, std::int64_t header_bytes, std::int64_t data_bytes) {
  header = at::Tensor();
  id = of;
  make_room(data, data_bytes);
  make_room(header, header_bytes);
}

void StatePart::load(const NamedSources& sources) const {
  StateListing listing = StateListing::decode(
      {static_cast<const std::byte*>(header.data_ptr()), static_cast<std::size_t>(header.numel())});
  std::vector<at::Tensor> tensors;
  std::int64_t at = 0;
  for (const StateListing::Entry& entry : listing.tensors) {
    const std::int64_t bytes = bytes_of_entry(entry, data.numel() - at);
    // Objects may keep what they read, and the copy's memory is used again.
    tensors.push_back(viewed(data, at, entry, bytes).clone());
    at = std::min(at + aligned_part(bytes), data.numel());
  }
  ReceivedState reader(std::move(listing), std::move(tensors));
  for (const auto& [name, source] : sources) {
    reader.set_prefix(name);
    source->load(reader);
  }
}

}  // namespace torchspan::elastic
