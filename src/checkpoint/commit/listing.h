#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/files/safetensors.h"

namespace torchspan::checkpoint {

/// A part of a tensor that a rank could write.
struct ListedPart {
  std::string name;
  ElementType type = ElementType::kU8;
  Sizes shape;  ///< of the whole tensor
  Box box;
  std::uint64_t fingerprint = 0;  ///< equal for replicas; 0: not checked
  std::string owner = {};         ///< worker that has the tensor; empty: the rank itself
  friend bool operator==(const ListedPart&, const ListedPart&) = default;
};
using Listing = std::vector<ListedPart>;

Bytes encode_listing(const Listing& listing);
/// Throws Error{kInvalid} for malformed bytes.
Listing decode_listing(BytesView bytes);

/// Which files are written, and by which process.
struct Plan {
  struct Share {
    std::size_t rank = 0;  ///< index of the rank that writes it, or lets the owner write it
    std::string owner;     ///< empty: the rank itself
    std::string file;
    std::vector<HeaderEntry> entries;  ///< of the file, in its order
    std::vector<std::size_t> parts;    ///< for each entry: its index in the rank's listing
  };
  std::vector<Share> shares;

  /// What `rank` itself writes; null: nothing.
  const Share* own_share(std::size_t rank) const;
};

/// Distributes the parts: of replicas, the first rank writes. Throws Error{kInvalid} if ranks disagree about a
/// tensor, naming both by `names`, or if the parts of a tensor do not make it up.
Plan make_plan(const std::vector<Listing>& listings, const std::vector<std::string>& names);

/// What was written for a share.
struct FileReport {
  SavedFile file;
  std::vector<std::uint64_t> checksums;  ///< by entry of its share
};
Bytes encode_report(const FileReport& report);
FileReport decode_report(ByteReader& in);

/// Adds the tensors and files of a plan to a manifest; `reports` by share.
void fill_manifest(Manifest& manifest, const std::vector<Listing>& listings, const Plan& plan,
                   const std::vector<FileReport>& reports);
TensorIndex index_of(const Manifest& manifest);

}  // namespace torchspan::checkpoint
