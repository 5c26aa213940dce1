#include "data_parallel/api/agreement.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <c10/core/ScalarType.h>

#include "core/api/agreement.h"
#include "core/api/hashes.h"
#include "core/api/throw_invalid.h"
#include "state/api/place.h"

namespace torchspan::data_parallel {
namespace {

constexpr const char* kElements = ", elements ";

std::string count_difference(const Agreement& one, const Agreement& other, std::size_t rank,
                             const std::string& things) {
  const auto& a = one.tensors;
  const auto& b = other.tensors;
  const std::size_t common = std::min(a.size(), b.size());
  std::size_t at = 0;
  while (at < common && a[at].name == b[at].name) ++at;
  const auto name = [at](const auto& list) {
    return at < list.size() ? "'" + list[at].name + "'" : "nothing";
  };
  return fmt::format("rank 0 has {} {}, rank {} has {}: number {} is {} on rank 0 and {} on rank {}",
                     a.size(), things, rank, b.size(), at, name(a), name(b), rank);
}

std::string tensor_difference(const Agreement& one, const Agreement& other, std::size_t rank) {
  for (std::size_t i = 0; i < one.tensors.size(); ++i) {
    const auto& a = one.tensors[i];
    const auto& b = other.tensors[i];
    if (a.name != b.name) {
      return fmt::format(
          "number {} is '{}' on rank 0 and '{}' on rank {}: the models differ, or "
          "register their parts in different orders",
          i, a.name, b.name, rank);
    }
    if (a.type == b.type) continue;
    const bool parts =
        a.type.find(kElements) != std::string::npos && b.type.find(kElements) != std::string::npos;
    return fmt::format("'{}' is {} on rank 0 and {} on rank {}{}", a.name, a.type, b.type, rank,
                       parts
                           ? ": different parts have no average; use a group of the ranks that have the same "
                             "part, or leave the parameter out"
                           : "");
  }
  return {};
}

std::string setting_difference(const Agreement& one, const Agreement& other, std::size_t rank) {
  for (std::size_t i = 0; i < std::min(one.settings.size(), other.settings.size()); ++i) {
    if (one.settings[i] == other.settings[i]) continue;
    return fmt::format("{} is {} on rank 0 and {} on rank {}", one.settings[i].first, one.settings[i].second,
                       other.settings[i].second, rank);
  }
  return one.settings.size() == other.settings.size() ? ""
                                                      : "the ranks run different versions of this library";
}

}  // namespace

std::string part_in_words(const at::Tensor& tensor) {
  const state::PlacePtr place = state::place_of(tensor);
  if (!place || !place->divided) return {};
  std::vector<std::string> boxes;
  for (const state::Box& box : place->boxes) boxes.push_back(state::describe(box));
  return fmt::format("{}{} of {}", kElements,
                     boxes.empty() ? "none" : fmt::format("{}", fmt::join(boxes, " and ")),
                     state::describe(place->shape));
}

void Agreement::add(std::string name, const at::Tensor& tensor, bool sparse_gradient) {
  tensors.push_back({std::move(name),
                     fmt::format("{} [{}] with strides [{}] on {}{}{}{}", c10::toString(tensor.scalar_type()),
                                 fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", "),
                                 c10::DeviceTypeName(tensor.device().type(), true),
                                 tensor.requires_grad() ? ", requiring a gradient" : ", without gradient",
                                 sparse_gradient ? " that is sparse" : "", part_in_words(tensor))});
}

Bytes Agreement::encode() const {
  ByteWriter out;
  out.put_string(failure);
  out.put(static_cast<std::uint32_t>(settings.size()));
  for (const auto& [name, value] : settings) {
    out.put_string(name);
    out.put_string(value);
  }
  out.put(static_cast<std::uint32_t>(tensors.size()));
  for (const TensorFacts& tensor : tensors) {
    out.put_string(tensor.name);
    out.put_string(tensor.type);
  }
  return out.take();
}

Agreement Agreement::decode(BytesView bytes) {
  ByteReader in(bytes);
  Agreement agreement;
  agreement.failure = in.get_string();
  agreement.settings.resize(in.get_count(8));
  for (auto& [name, value] : agreement.settings) {
    name = in.get_string();
    value = in.get_string();
  }
  agreement.tensors.resize(in.get_count(8));
  for (TensorFacts& tensor : agreement.tensors) {
    tensor.name = in.get_string();
    tensor.type = in.get_string();
  }
  in.expect_end();
  return agreement;
}

std::string first_difference(const std::vector<Agreement>& by_rank, const std::string& things) {
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (!by_rank[rank].failure.empty())
      return fmt::format("rank {} cannot begin: {}", rank, by_rank[rank].failure);
  }
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    const Agreement& one = by_rank[0];
    const Agreement& other = by_rank[rank];
    if (std::string text = setting_difference(one, other, rank); !text.empty()) return text;
    if (one.tensors.size() != other.tensors.size()) return count_difference(one, other, rank, things);
    if (std::string text = tensor_difference(one, other, rank); !text.empty()) return text;
  }
  return {};
}

void check_device(const collective::Group& group, const std::string& name, const at::Tensor& tensor) {
  const collective::Backend& backend = *group.backend();
  if (backend.takes(tensor.device())) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("'{}' is on {}, which the group's backend ({}) does not support: make the group with "
                  "GroupOptions::device set to that device, or move the module to the CPU or to the group's "
                  "device before it is wrapped",
                  name, tensor.device().str(), backend.name()));
}

void agree(const collective::Group& group, const Agreement& mine, const std::string& things) {
  const Bytes all = mine.encode();
  ByteWriter out;
  out.put(static_cast<std::uint8_t>(!mine.failure.empty()));
  // Two start values make collisions improbable.
  const std::string_view text(reinterpret_cast<const char*>(all.data()), all.size());
  out.put(fnv1a(text));
  out.put(fnv1a(text, 0x9e3779b97f4a7c15ULL));
  const std::vector<Bytes> digests = group.all_gather_bytes(out.bytes());
  if (mine.failure.empty() && !torchspan::first_difference(digests)) return;
  std::vector<Agreement> by_rank;
  for (const Bytes& bytes : group.all_gather_bytes(all)) by_rank.push_back(Agreement::decode(bytes));
  throw_invalid("the ranks cannot train together: {}. Give every rank the same model, options and hooks",
                first_difference(by_rank, things));
}

}  // namespace torchspan::data_parallel
