#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/checkpoint/checkpoint.h>
#include <torchspan/core/error.h>

#include "checkpoint/api/source_names.h"
#include "checkpoint/files/directory.h"
#include "checkpoint/state/folder_reader.h"

namespace torchspan {

struct Checkpoint::Content {
  explicit Content(const std::string& folder)
      : reader(folder, checkpoint::open_manifest(checkpoint::Disk(), folder)) {}
  checkpoint::FolderReader reader;
};

Checkpoint::Checkpoint(std::string folder)
    : folder_(std::move(folder)), content_(std::make_shared<Content>(folder_)) {}

Checkpoint Checkpoint::newest(const std::string& directory) {
  std::string reason;
  for (const std::string& folder : list(directory)) {
    try {
      Checkpoint found(folder);
      found.verify();
      return found;
    } catch (const Error& error) {
      if (reason.empty()) reason = error.message();  // that of the newest one
    }
  }
  throw_invalid(fmt::format("no checkpoint in '{}' can be used: {}", directory,
                            reason.empty() ? "it has none" : reason));
}

std::vector<std::string> Checkpoint::list(const std::string& directory) {
  const checkpoint::Disk disk;
  const checkpoint::Directory all(disk, directory);
  std::vector<std::string> folders;
  for (const checkpoint::Committed& one : all.committed()) folders.push_back(all.path_of(one.name));
  return folders;
}

std::int64_t Checkpoint::step() const { return content_->reader.step(); }
int Checkpoint::world_size() const { return content_->reader.manifest().world_size; }
std::optional<double> Checkpoint::metric() const { return content_->reader.manifest().metric; }
void Checkpoint::verify() const {
  checkpoint::verify_data(checkpoint::Disk(), folder_, content_->reader.manifest());
}

std::vector<std::string> Checkpoint::names() const {
  content_->reader.set_prefix("");
  return content_->reader.names();
}

at::Tensor Checkpoint::read(const std::string& name) const {
  content_->reader.set_prefix("");
  return content_->reader.read(name);
}

const std::map<std::string, checkpoint::Value>& Checkpoint::values() const {
  return content_->reader.manifest().values;
}

void Checkpoint::load_source(const std::string& name, checkpoint::StateSource& source) const {
  content_->reader.set_prefix(name);
  if (source.is_of_rank()) {
    const std::string found = checkpoint::name_for_rank(content_->reader, 0);
    if (found != name && checkpoint::name_for_rank(content_->reader, 1) != found) {
      throw_invalid(fmt::format("'{}' was saved by each rank for itself: load the state of one, such as '{}'",
                                name, found));
    }
    content_->reader.set_prefix(found);
  }
  source.load(content_->reader);
}

}  // namespace torchspan
