#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/checkpoint/sources.h>

namespace torchspan {

/// A complete checkpoint, for programs that inspect, export or serve it in one process. Reads the folder of a
/// step, written by any number of ranks. Cheap to copy; not thread-safe.
class Checkpoint {
 public:
  /// Checks the manifest and the sizes and headers of all files; Error{kInvalid} names what is damaged.
  explicit Checkpoint(std::string folder);
  /// The newest checkpoint in a directory whose checksums match. Throws Error{kInvalid} if there is none.
  static Checkpoint newest(const std::string& directory);
  /// Folders of the checkpoints in a directory, newest first; not checked.
  static std::vector<std::string> list(const std::string& directory);

  const std::string& folder() const { return folder_; }
  std::int64_t step() const;
  /// Number of ranks that saved it.
  int world_size() const;
  std::optional<double> metric() const;
  /// Checks the checksums of all data; throws Error{kInvalid} that names tensor and file.
  void verify() const;

  std::vector<std::string> names() const;
  /// A whole tensor; shards are put together. Shares memory with no other tensor. See StateReader::read().
  at::Tensor read(const std::string& name) const;
  const std::map<std::string, checkpoint::Value>& values() const;
  /// Restores an object that was saved under `name`: checkpoint.load("model", net).
  template <class T>
  void load(const std::string& name, T& object) const {
    load_source(name, *checkpoint::source_of(object));
  }
  void load_source(const std::string& name, checkpoint::StateSource& source) const;

 private:
  struct Content;
  std::string folder_;
  std::shared_ptr<Content> content_;
};

}  // namespace torchspan
