#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/future.h>

#include "state/api/gradient_norm.h"

namespace torchspan::sharded {

/// An all-gather into one flat tensor of size() parts of equal length, in the order of ranks. Over shared memory each
/// part is copied once, from shared_or_private() memory to its place; elsewhere large parts arrive in place. Touch
/// neither tensor before wait() returns.
class PartGather {
 public:
  PartGather() = default;
  /// Issues the operations. `part`: that of this rank, which may be in its place in `flat`. Its length must be equal on
  /// all ranks, or all of them fail.
  PartGather(const collective::Group& group, at::Tensor flat, at::Tensor part);

  bool running() const { return flat_.defined(); }
  /// Throws what the group throws.
  void wait();

 private:
  at::Tensor flat_, part_;
  std::vector<Future<at::Tensor>> parts_;     ///< one operation or one of each rank; or
  Future<std::vector<at::Tensor>> gathered_;  ///< copies of all parts
};

/// Memory for parts: shared with the ranks of the group, which then read it without a copy in between, unless the
/// tensors are on a device or there is no shared memory left. Uninitialized.
at::Tensor shared_or_private(const collective::Group& group, std::int64_t count,
                             const at::TensorOptions& options);

/// The indices of two tensors that have elements in the same memory; nullopt if there are none. Ignores tensors with
/// gaps between their elements.
std::optional<std::pair<std::size_t, std::size_t>> overlapping(const std::vector<at::Tensor>& tensors);

struct ClipTerms {
  /// Throws Error{kInvalid} unless both are > 0.
  ClipTerms(double max, double type);

  double max_norm, norm_type;
};

/// Collective over the ranks of the places: divides gradients by `scale`; returns whether an element is not finite on any rank.
bool unscale_at_places(const std::vector<state::PlacedGradient>& gradients, double scale);

}  // namespace torchspan::sharded
