#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/checkpoint/sources.h>

#include "elastic/recovery/copy_inventory.h"
#include "elastic/transfer/state_listing.h"

namespace torchspan::elastic {

/// Registered objects with their names.
using NamedSources = std::vector<std::pair<std::string, checkpoint::SourcePtr>>;

/// A copy of one rank's state in two tensors of bytes, in which it is also sent.
struct StatePart {
  CopyId id;
  at::Tensor header;  ///< an encoded StateListing
  at::Tensor data;    ///< the tensors of the listing, each at a multiple of kAlignment

  static constexpr std::int64_t kAlignment = 64;

  bool exists() const { return header.defined(); }
  /// Keeps the memory of `data` for the next copy.
  void forget() { header.reset(); }
  /// Copies the state; reuses the memory of `data` if it fits. Throws Error{kUnsupported} that names an object whose
  /// state is a part of a tensor or on another worker.
  void take(const CopyId& of, const NamedSources& sources);
  /// Makes room for a part that another rank sends.
  void expect(const CopyId& of, std::int64_t header_bytes, std::int64_t data_bytes);
  /// Restores the objects. Throws Error{kInvalid} that names what does not fit.
  void load(const NamedSources& sources) const;
};

}  // namespace torchspan::elastic
