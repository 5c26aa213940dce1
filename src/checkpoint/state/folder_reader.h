#pragma once
#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/checkpoint.h>

#include "checkpoint/files/manifest.h"
#include "checkpoint/files/safetensors.h"

namespace torchspan::checkpoint {

/// Reads the tensors of a manifest from the safetensors files in a folder, which it maps when they are first
/// used. Nothing else uses the memory of a tensor that it returns: a mapping of its part of the file, or a copy.
class FolderReader final : public StateReader {
 public:
  FolderReader(std::string folder, Manifest manifest);

  const Manifest& manifest() const { return manifest_; }
  /// How a tensor's owner is made to read from this folder; without it such reads fail.
  using ReadOnOwner =
      std::function<void(const std::string& folder, const std::string& name, const RemoteValue&)>;
  void set_read_on_owner(ReadOnOwner read) { read_on_owner_ = std::move(read); }
  std::int64_t step() const override { return manifest_.step; }
  /// A byte for each tensor, in the manifest's order: 1 if it was read, also in part or by its owner, or compared with a
  /// registered one, of which this rank may have no elements.
  Bytes usage() const;

 protected:
  std::vector<std::string> all_names() const override;
  bool contains(const std::string& full_name) const override { return manifest_.tensors.contains(full_name); }
  at::Tensor read_tensor(const std::string& full_name) const override;
  Sizes shape_of(const std::string& full_name) const override;
  at::ScalarType dtype_of(const std::string& full_name) const override;
  void read_box(const std::string& full_name, const at::Tensor& target, const Sizes& offset) const override;
  const Value* find_value(const std::string& full_name) const override;
  void read_on_owner(const std::string& full_name, const RemoteValue& value) const override;
  std::string describe() const override;

 private:
  const SavedTensor& saved(const std::string& full_name) const;
  const std::shared_ptr<const MappedFile>& file(const std::string& name) const;
  BytesView data_of(const std::string& full_name, const SavedBox& box) const;

  const std::string folder_;
  const Manifest manifest_;
  ReadOnOwner read_on_owner_;
  mutable std::set<std::string> used_;
  /// How many of the returned tensors live and have a mapping; shared with them.
  const std::shared_ptr<std::atomic<std::size_t>> mapped_tensors_ =
      std::make_shared<std::atomic<std::size_t>>(0);
  mutable std::map<std::string, std::shared_ptr<const MappedFile>> files_;
};

}  // namespace torchspan::checkpoint
