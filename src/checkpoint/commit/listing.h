#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torchspan/core/bytes.h>

#include "checkpoint/files/boxes.h"
#include "checkpoint/files/header.h"
#include "checkpoint/files/manifest.h"

namespace torchspan::checkpoint {

/// A part of a tensor that a rank could write.
struct ListedPart {
  std::string name;
  ElementType type = ElementType::kU8;
  Sizes shape;  ///< of the whole tensor
  Box box;
  std::uint64_t fingerprint = 0;  ///< equal for replicas; 0: not checked
  friend bool operator==(const ListedPart&, const ListedPart&) = default;
};
using Listing = std::vector<ListedPart>;

Bytes encode_listing(const Listing& listing);
/// Throws Error{kInvalid} for malformed bytes.
Listing decode_listing(BytesView bytes);

/// What each writer writes.
struct Plan {
  struct Share {
    std::string file;                  ///< empty: writes nothing
    std::vector<HeaderEntry> entries;  ///< of the file, in its order
    std::vector<std::size_t> parts;    ///< for each entry: its index in the writer's listing
  };
  std::vector<Share> shares;  ///< by writer
};

/// Distributes the parts: of replicas, the first writer writes. Throws Error{kInvalid} if writers disagree about
/// a tensor, naming both by `writers`, or if the parts of a tensor do not make it up.
Plan make_plan(const std::vector<Listing>& listings, const std::vector<std::string>& writers);

/// What a writer reports about its file.
struct FileReport {
  SavedFile file;
  std::vector<std::uint64_t> checksums;  ///< by entry of its share
};
/// The tensors and files of a manifest.
void fill_manifest(Manifest& manifest, const std::vector<Listing>& listings, const Plan& plan,
                   const std::vector<FileReport>& reports);
TensorIndex index_of(const Manifest& manifest);

}  // namespace torchspan::checkpoint
