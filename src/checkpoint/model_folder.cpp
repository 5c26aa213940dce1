#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/manifest.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/state/folder_reader.h"
#include "checkpoint/state/snapshot.h"
#include "checkpoint/state/torch_types.h"
#include "core/api/throw_invalid.h"
#include "state/api/place.h"
#include "state/api/save_load.h"

namespace torchspan::checkpoint {

using state::append_module_tensors;
using state::load_module_tensors;
using state::ModuleTensor;

namespace {

constexpr const char* kSingleFile = "model.safetensors";

/// The entries of one file, in its order, and their tensors.
struct FileContent {
  std::vector<HeaderEntry> entries;
  std::vector<at::Tensor> tensors;
  std::uint64_t bytes = 0;
};

FileContent content_of(const NamedTensors& tensors) {
  FileContent content;
  StateWriter listed;  // its errors name the tensor
  for (const auto& [name, tensor] : tensors) listed.add(name, tensor);
  for (const ListedPart& part : listing_of(listed.tensors()))
    content.entries.push_back({part.name, part.type, part.shape});
  sort_for_alignment(content.entries);
  for (const HeaderEntry& entry : content.entries) {
    content.tensors.push_back(
        tensors.at(entry.name).detach().resolve_conj().resolve_neg().cpu().contiguous());
    content.bytes += content.tensors.back().nbytes();
  }
  return content;
}

/// Files that are written under temporary names. Removes those that it has created and not published.
class TemporaryFiles {
 public:
  explicit TemporaryFiles(const Disk& disk) : disk_(disk) {}
  ~TemporaryFiles() {
    for (const std::string& path : paths_) disk_.discard(&Disk::remove_file, temporary_name(path));
  }
  TemporaryFiles(const TemporaryFiles&) = delete;
  TemporaryFiles& operator=(const TemporaryFiles&) = delete;

  void write(const std::string& path, const FileContent& content, const Metadata& metadata) {
    std::vector<BytesView> data;
    for (const at::Tensor& tensor : content.tensors)
      data.push_back(tensor.numel() == 0 ? BytesView() : bytes_of(tensor));
    disk_.create(temporary_name(path));  // if this throws, then what is there is not this object's
    paths_.insert(path);
    write_tensor_file(disk_, temporary_name(path), content.entries, data, metadata);
  }
  /// Gives a written file its name, at once.
  void publish(const std::string& path) {
    disk_.rename(temporary_name(path), path);
    paths_.erase(path);
  }

 private:
  static std::string temporary_name(const std::string& path) { return path + ".partial"; }

  const Disk& disk_;
  std::set<std::string> paths_;
};

/// "model-00001-of-00002.safetensors".
std::string numbered_name(std::size_t number, std::size_t count) {
  return fmt::format("model-{:05}-of-{:05}.safetensors", number, count);
}

bool is_numbered_name(std::string_view name) {
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return std::ranges::equal(name, kPattern, [](char letter, char wanted) {
    return wanted == '#' ? letter >= '0' && letter <= '9' : letter == wanted;
  });
}

void require_whole(const ModuleTensor& entry) {
  const state::PlacePtr place = state::place_of(entry.tensor);
  if (!place || !place->divided || entry.tensor.sizes() == at::IntArrayRef(place->shape)) return;
  throw_invalid(
      "this rank has a part of '{}', whose shape is {}, so save_model() cannot save it: save a checkpoint "
      "(CheckpointManager) and load that in one process; for a FullyShardedDataParallel alone, call "
      "with_full_parameters()",
      entry.names.front(), describe(place->shape));
}

/// The parameters and buffers of a module, divided into files.
std::vector<NamedTensors> divide(const torch::nn::Module& module, std::uint64_t max_file_bytes) {
  std::vector<ModuleTensor> all;
  append_module_tensors(all, module, "");
  std::vector<NamedTensors> files(1);
  std::uint64_t bytes = 0;
  for (const ModuleTensor& entry : all) {
    require_whole(entry);
    if (bytes > 0 && bytes + entry.tensor.nbytes() > max_file_bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().emplace(entry.names.front(), entry.tensor);
    bytes += entry.tensor.nbytes();
  }
  return files;
}

/// Gives the written files their names. Until all of them have theirs, the folder has neither an index nor, if there
/// are several files, a single one: readers find no model rather than parts of two. Also removes the files of an
/// earlier model.
void publish_model(const Disk& disk, TemporaryFiles& written, const std::string& folder,
                   const std::set<std::string>& names, const TensorIndex& index) {
  const bool single = names.size() == 1;
  disk.remove_file(folder + "/" + kIndexFile);
  if (!single) disk.remove_file(folder + "/" + kSingleFile);
  disk.sync_folder(folder);
  for (const std::string& name : names) written.publish(folder + "/" + name);
  if (!single) disk.replace_file(folder + "/" + kIndexFile, encode_index(index));
  for (const std::string& name : disk.list(folder)) {
    if (is_numbered_name(name) && !names.contains(name)) disk.remove_file(folder + "/" + name);
  }
}

void add_file(Manifest& manifest, const std::string& folder, const std::string& name,
              const std::map<std::string, std::string>* chosen) {
  const MappedFile file(folder + "/" + name);
  manifest.files[name] = {file.size(), file.header().data_start, 0};
  for (const HeaderEntry& entry : file.header().entries) {
    if (chosen != nullptr) {
      const auto place = chosen->find(entry.name);
      if (place == chosen->end() || place->second != name) continue;
    }
    manifest.tensors[entry.name] = {
        entry.type, entry.shape, {{whole_box(entry.shape), name, entry.name, entry.begin, 0}}};
  }
}

/// A reader of a file, or of a folder with an index or a single file.
FolderReader open_model(const std::string& path) {
  const Disk disk;
  Manifest manifest;
  if (disk.file_size(path) >= 0) {
    const std::filesystem::path file(path);
    add_file(manifest, parent_of(path), file.filename(), nullptr);
    return {parent_of(path), std::move(manifest)};
  }
  const std::string index_path = path + "/" + kIndexFile;
  if (disk.file_size(index_path) < 0) {
    if (disk.file_size(path + "/" + kSingleFile) < 0) {
      throw_invalid("'{}' is neither a safetensors file nor a folder with '{}' or '{}'", path, kSingleFile,
                    kIndexFile);
    }
    add_file(manifest, path, kSingleFile, nullptr);
    return {path, std::move(manifest)};
  }
  const TensorIndex index =
      parse_index(disk.read_file(index_path, kMostManifestBytes), fmt::format("'{}'", index_path));
  for (const auto& [tensor, file] : index.files) {
    if (!manifest.files.contains(file)) add_file(manifest, path, file, &index.files);
    if (!manifest.tensors.contains(tensor))
      throw_invalid("'{}' says that '{}' is in '{}', which lacks it", index_path, tensor, file);
  }
  return {path, std::move(manifest)};
}

}  // namespace

void save_model(const torch::nn::Module& module, const std::string& folder, SaveModelOptions options) {
  const Disk disk;
  const std::vector<NamedTensors> files = divide(module, options.max_file_bytes);
  disk.make_folder(folder);
  TemporaryFiles written(disk);
  std::set<std::string> names;
  TensorIndex index;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = files.size() == 1 ? kSingleFile : numbered_name(i + 1, files.size());
    names.insert(name);
    const FileContent content = content_of(files[i]);
    written.write(folder + "/" + name, content, options.metadata);
    index.total_bytes += content.bytes;
    for (const auto& [tensor, value] : files[i]) index.files[tensor] = name;
  }
  publish_model(disk, written, folder, names, index);
}

void load_model(torch::nn::Module& module, const std::string& path, LoadModelOptions options) {
  const FolderReader reader = open_model(path);
  std::vector<ModuleTensor> all;
  append_module_tensors(all, module, "");
  if (options.saved_name) {
    for (ModuleTensor& entry : all) {
      for (std::string& name : entry.names) name = options.saved_name(name);
    }
  }
  try {
    load_module_tensors(reader, all, {options.allow_missing, options.allow_unexpected, options.cast});
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("'{}' was not loaded: {}", path, error.message()));
  }
}

void save_safetensors(const std::string& file, const NamedTensors& tensors, const Metadata& metadata) {
  const Disk disk;
  TemporaryFiles written(disk);
  written.write(file, content_of(tensors), metadata);
  written.publish(file);
}

NamedTensors load_safetensors(const std::string& path) {
  const FolderReader reader = open_model(path);
  NamedTensors tensors;
  for (const std::string& name : reader.names()) tensors.emplace(name, reader.read(name));
  return tensors;
}

}  // namespace torchspan::checkpoint
