#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>

#include "sharded/units/flat_layout.h"

namespace torchspan::sharded {

/// The parts of all ranks as the flat tensor that they are parts of: read-only views of the memory in which each rank
/// keeps its part, at adjacent addresses, without a copy.
class JoinedParts {
 public:
  /// Elements of `dtype` in a page, to which the chunks of a layout must be rounded; 0 if ranks of the group cannot map
  /// each other's memory.
  static std::int64_t step(const collective::Group& group, at::ScalarType dtype);
  /// Collective. Null on all ranks if one of them cannot map all parts.
  static std::unique_ptr<JoinedParts> make(const collective::Group& group, const at::Tensor& part,
                                           const FlatLayout& layout);
  ~JoinedParts();
  JoinedParts(const JoinedParts&) = delete;
  JoinedParts& operator=(const JoinedParts&) = delete;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  /// What was read no longer counts as memory of this process until it is read again.
  void forget() const;

 private:
  JoinedParts() = default;
  bool map(const std::vector<std::byte*>& parts, std::size_t item, const FlatLayout& layout);

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace torchspan::sharded
