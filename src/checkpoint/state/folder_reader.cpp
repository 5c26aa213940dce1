#include "checkpoint/state/folder_reader.h"

#include <cstring>
#include <fmt/format.h>
#include <sys/mman.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>

#include "checkpoint/api/names_and_values.h"
#include "checkpoint/files/directory.h"
#include "checkpoint/state/torch_types.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::int64_t kCopyBytes = std::int64_t{4} << 20;
constexpr std::uintptr_t kPage = 4096;
/// Smaller tensors are copied, which takes less time than a mapping and its page faults.
constexpr std::size_t kLeastMappedBytes = std::size_t{1} << 20;
/// Most mappings that the tensors of one reader have at a time; further tensors are copied. Linux allows 65530 mappings in
/// a process.
constexpr std::size_t kMostMappedTensors = 4096;

/// Maps the pages of a range in one call, which costs a fraction of a fault for each; a hint.
void populate(const std::byte* data, std::int64_t size) {
#ifdef MADV_POPULATE_READ
  const auto begin = reinterpret_cast<std::uintptr_t>(data) / kPage * kPage;
  const auto end = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(size);
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
#endif
}

void copy_bytes(std::byte* target, BytesView source) {
  const auto size = static_cast<std::int64_t>(source.size());
  const std::int64_t parts = (size + kCopyBytes - 1) / kCopyBytes;
  at::parallel_for(0, parts, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t part = first; part < last; ++part) {
      const std::int64_t at = part * kCopyBytes;
      const std::int64_t length = std::min(kCopyBytes, size - at);
      populate(source.data() + at, length);
      std::memcpy(target + at, source.data() + at, static_cast<std::size_t>(length));
    }
  });
}

/// Whether the bytes of the tensor's memory are its values, in order.
bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

/// The part of `tensor`, whose first element is at `origin` of the whole tensor, that is `box`.
at::Tensor narrowed(at::Tensor tensor, const Sizes& origin, const Box& box) {
  for (std::size_t d = 0; d < origin.size(); ++d)
    tensor = tensor.narrow(static_cast<std::int64_t>(d), box.offset[d] - origin[d], box.size[d]);
  return tensor;
}

}  // namespace

FolderReader::FolderReader(std::string folder, Manifest manifest)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {}

std::vector<std::string> FolderReader::all_names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : manifest_.tensors) names.push_back(name);
  return names;
}

Bytes FolderReader::usage() const {
  Bytes usage;
  for (const auto& [name, tensor] : manifest_.tensors)
    usage.push_back(static_cast<std::byte>(used_.contains(name)));
  return usage;
}

std::string FolderReader::describe() const { return fmt::format("checkpoint '{}'", folder_); }

const SavedTensor& FolderReader::saved(const std::string& full_name) const {
  const auto found = manifest_.tensors.find(full_name);
  if (found == manifest_.tensors.end()) throw_invalid("{} has no tensor '{}'", describe(), full_name);
  return found->second;
}

Sizes FolderReader::shape_of(const std::string& full_name) const {
  used_.insert(full_name);
  return saved(full_name).shape;
}

at::ScalarType FolderReader::dtype_of(const std::string& full_name) const {
  const SavedTensor& tensor = saved(full_name);
  used_.insert(full_name);
  const auto type = scalar_type_of(tensor.type);
  if (!type) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("{}: the tensor '{}' has dtype {}, which this LibTorch lacks", describe(),
                            full_name, to_string(tensor.type)));
  }
  return *type;
}

const std::shared_ptr<const MappedFile>& FolderReader::file(const std::string& name) const {
  auto& file = files_[name];
  if (!file) file = std::make_shared<const MappedFile>(folder_ + "/" + name);
  return file;
}

BytesView FolderReader::data_of(const std::string& full_name, const SavedBox& box) const {
  const auto& mapped = file(box.file);
  const HeaderEntry* entry = mapped->find(box.key);
  const SavedTensor& tensor = saved(full_name);
  if (entry == nullptr || entry->begin != box.begin || entry->type != tensor.type ||
      entry->shape != box.box.size) {
    throw_invalid("'{}' does not contain the part {} of tensor '{}' that the manifest describes",
                  mapped->path(), checkpoint::describe(box.box), full_name);
  }
  return mapped->data(*entry);
}

at::Tensor FolderReader::read_tensor(const std::string& full_name) const {
  const SavedTensor& tensor = saved(full_name);
  const at::ScalarType type = dtype_of(full_name);
  used_.insert(full_name);
  if (tensor.boxes.size() == 1 && *mapped_tensors_ < kMostMappedTensors) {
    const BytesView data = data_of(full_name, tensor.boxes[0]);
    const bool aligned = reinterpret_cast<std::uintptr_t>(data.data()) % c10::elementSize(type) == 0;
    Buffer own =
        aligned && data.size() >= kLeastMappedBytes ? file(tensor.boxes[0].file)->map_again(data) : Buffer();
    if (own.owner) {
      ++*mapped_tensors_;
      const auto release = [owner = std::move(own.owner), count = mapped_tensors_](void*) mutable {
        owner.reset();
        --*count;
      };
      return at::from_blob(own.data, tensor.shape, release, at::TensorOptions(type));
    }
  }
  at::Tensor result = at::empty(tensor.shape, type);
  read_box(full_name, result, Sizes(tensor.shape.size(), 0));
  return result;
}

void FolderReader::read_box(const std::string& full_name, const at::Tensor& target,
                            const Sizes& offset) const {
  const at::NoGradGuard no_grad;
  used_.insert(full_name);
  const Box wanted{offset, sizes_of(target)};
  const at::Tensor plain = target.detach();
  for (const SavedBox& box : saved(full_name).boxes) {
    const std::optional<Box> common = intersection(wanted, box.box);
    if (!common) continue;
    const BytesView data = data_of(full_name, box);
    if (*common == wanted && *common == box.box && is_plain_memory(plain)) {
      copy_bytes(static_cast<std::byte*>(plain.data_ptr()), data);
      continue;
    }
    // Other files may store data unaligned; LibTorch's operators expect aligned data.
    at::Tensor source = borrow_tensor(data.data(), box.box.size, target.scalar_type());
    if (reinterpret_cast<std::uintptr_t>(data.data()) % target.element_size() != 0) {
      source = at::empty(box.box.size, target.scalar_type());
      std::memcpy(source.data_ptr(), data.data(), data.size());
    }
    narrowed(plain, wanted.offset, *common).copy_(narrowed(source, box.box.offset, *common));
  }
}

void FolderReader::read_on_owner(const std::string& full_name, const RemoteValue& value) const {
  if (!read_on_owner_)
    throw_invalid("'{}' is on another worker; make the CheckpointManager with a session", full_name);
  read_on_owner_(folder_, full_name, value);
  for (const auto& [name, tensor] : manifest_.tensors) {
    if (name == full_name || name.starts_with(full_name + ".")) used_.insert(name);
  }
}

const Value* FolderReader::find_value(const std::string& full_name) const {
  const auto found = manifest_.values.find(full_name);
  return found == manifest_.values.end() ? nullptr : &found->second;
}

}  // namespace torchspan::checkpoint

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
  throw_invalid("no checkpoint in '{}' can be used: {}", directory, reason.empty() ? "it has none" : reason);
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
      throw_invalid("'{}' was saved by each rank for itself: load the state of one, such as '{}'", name,
                    found);
    }
    content_->reader.set_prefix(found);
  }
  source.load(content_->reader);
}

}  // namespace torchspan
