#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/checkpoint.h>

#include "checkpoint/files/safetensors.h"
#include "state/api/place.h"

namespace torchspan::checkpoint {

/// The box of a whole tensor.
Box whole_box(const Sizes& shape);
/// The common part of two boxes of one tensor; nullopt if they share no element. A tensor without dimensions
/// has one element.
std::optional<Box> intersection(const Box& a, const Box& b);
/// Why these boxes do not cover the box `wanted` exactly once; empty if they do.
std::string coverage_fault(const Box& wanted, const std::vector<Box>& boxes);

/// A box of a tensor in a file.
struct SavedBox {
  Box box;
  std::string file;
  std::string key;          ///< name of the tensor in the file
  std::uint64_t begin = 0;  ///< of its data, relative to the file's data
  std::uint64_t checksum = 0;
  friend bool operator==(const SavedBox&, const SavedBox&) = default;
};

struct SavedTensor {
  ElementType type = ElementType::kU8;
  Sizes shape;
  std::vector<SavedBox> boxes;  ///< together, each element once
  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;
};

struct SavedFile {
  std::uint64_t bytes = 0;
  std::uint64_t head_bytes = 0;  ///< bytes at the start that `head_checksum` covers
  std::uint64_t head_checksum = 0;
  friend bool operator==(const SavedFile&, const SavedFile&) = default;
};

/// What a checkpoint consists of. A folder without a valid manifest is not a checkpoint.
struct Manifest {
  std::int64_t step = 0;
  int world_size = 1;
  std::optional<double> metric = {};
  std::map<std::string, SavedFile> files = {};
  std::map<std::string, SavedTensor> tensors = {};
  std::map<std::string, Value> values = {};
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

constexpr const char* kManifestFile = "manifest.json";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr std::uint64_t kMostManifestBytes = std::uint64_t{1} << 30;

/// JSON with a checksum over its content.
std::string encode_manifest(const Manifest& manifest);
/// Throws Error{kInvalid} beginning with `what` for a damaged or contradictory manifest: wrong checksum,
/// duplicate keys, boxes outside their tensor, overlaps, elements without a box, unknown files.
Manifest parse_manifest(std::string_view text, const std::string& what);

/// Where each tensor is, by the convention of the Hugging Face libraries.
struct TensorIndex {
  std::uint64_t total_bytes = 0;
  std::map<std::string, std::string> files;  ///< by tensor
};
std::string encode_index(const TensorIndex& index);
TensorIndex parse_index(std::string_view text, const std::string& what);

/// Whether `name` is a plain file name without a folder.
bool is_plain_name(std::string_view name);

}  // namespace torchspan::checkpoint
