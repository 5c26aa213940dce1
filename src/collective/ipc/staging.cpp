#include "collective/ipc/staging.h"

#include <fmt/format.h>

#include "device/api/tensors.h"

namespace torchspan::collective::ipc {
namespace {

int world_rank(const Backend& control, int rank) { return control.ranks()[static_cast<std::size_t>(rank)]; }

/// This rank's allocation and its handle, or why there is none.
struct Offer {
  std::shared_ptr<std::byte> memory = {};
  Bytes handle = {};
  std::string trouble = {};

  Bytes encode() const {
    ByteWriter writer;
    writer.put_string(trouble);
    writer.put_bytes(handle);
    return writer.take();
  }
};

Offer make_offer(const EngineParts& parts, std::size_t bytes) {
  Offer offer;
  try {
    offer.memory = parts.runtime->allocate(parts.device, bytes);
    offer.handle = parts.runtime->export_memory(parts.device, offer.memory.get());
  } catch (...) {
    offer.trouble = torchspan::describe(std::current_exception()).text;
  }
  return offer;
}

}  // namespace

at::Tensor device_view(std::byte* data, std::int64_t count, at::ScalarType dtype, c10::Device device) {
  return device::view_memory(data, {count}, {1}, dtype, device);
}

at::Tensor device_bytes(const at::Tensor& tensor) {
  // A contiguous tensor of one element may have any strides.
  const at::Tensor flat = tensor.as_strided({tensor.numel()}, {1});
  return flat.scalar_type() == at::kByte ? flat : flat.view(at::kByte);
}

Staging::Staging(const EngineParts& parts, std::size_t area_bytes) : parts_(parts), area_bytes_(area_bytes) {
  Backend& control = *parts.control;
  const std::size_t bytes = 2 * area_bytes_;
  const Offer mine = make_offer(parts, bytes);
  const std::vector<Bytes> offers = control.all_gather_bytes(mine.encode(), parts.timeout);
  std::string trouble;
  for (int rank = 0; rank < control.size() && trouble.empty(); ++rank) {
    ByteReader reader(offers[static_cast<std::size_t>(rank)]);
    trouble = reader.get_string();
    if (!trouble.empty()) {
      trouble = fmt::format("rank {}: {}", world_rank(control, rank), trouble);
      break;
    }
    try {
      memory_.push_back(rank == control.rank() ? mine.memory
                                               : parts.runtime->open_memory(
                                                     parts.device, reader.get_bytes(reader.left()), bytes));
    } catch (...) {
      trouble =
          fmt::format("rank {} cannot map the memory of rank {}: {}", world_rank(control, control.rank()),
                      world_rank(control, rank), torchspan::describe(std::current_exception()).text);
    }
  }
  ByteWriter outcome;
  outcome.put_string(trouble);
  for (const Bytes& theirs : control.all_gather_bytes(outcome.bytes(), parts.timeout)) {
    const std::string text = ByteReader(theirs).get_string();
    if (text.empty()) continue;
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("the ranks cannot map each other's device memory: {}; run them in one container, which "
                    "shares process numbers and memory, or use BackendKind::kNccl",
                    text));
  }
}

Staging::~Staging() {
  for (std::size_t rank = 0; rank < memory_.size(); ++rank) {
    if (static_cast<int>(rank) != parts_.control->rank()) memory_[rank].reset();
  }
  static_cast<void>(all_ranks_end(parts_));
}

at::Tensor Staging::view(int rank, std::size_t offset, std::size_t bytes) const {
  return device_view(memory_[static_cast<std::size_t>(rank)].get() + offset, static_cast<std::int64_t>(bytes),
                     at::kByte, parts_.device);
}

}  // namespace torchspan::collective::ipc
