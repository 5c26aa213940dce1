#include "checkpoint/files/directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <set>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <tuple>
#include <unistd.h>
#include <utility>

#include <torchspan/core/error.h>

#include "checkpoint/files/disk.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/files/strict_json.h"
#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTrashPrefix = "trash-";
constexpr std::string_view kPartialMark = ".partial-";

std::optional<Committed> parse_step_name(const std::string& name) {
  std::string_view rest = name;
  if (!rest.starts_with(kStepPrefix)) return std::nullopt;
  rest.remove_prefix(kStepPrefix.size());
  const std::size_t dot = rest.find('.');
  const auto step = parse_number<std::int64_t>(rest.substr(0, dot));
  const auto attempt = dot == std::string_view::npos ? 1 : parse_number<int>(rest.substr(dot + 1));
  if (!step || !attempt) return std::nullopt;
  return Committed{*step, *attempt, name};
}

std::string step_name(std::int64_t step, int attempt) {
  return attempt == 1 ? fmt::format("{}{:08}", kStepPrefix, step)
                      : fmt::format("{}{:08}.{}", kStepPrefix, step, attempt);
}

/// The entries of a file must be exactly the boxes that the manifest has in it.
void check_header_entries(const MappedFile& file, const std::string& file_name, const Manifest& manifest) {
  std::size_t count = 0;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const SavedBox& saved : tensor.boxes) {
      if (saved.file != file_name) continue;
      ++count;
      const HeaderEntry* entry = file.find(saved.key);
      if (entry == nullptr || entry->type != tensor.type || entry->shape != saved.box.size ||
          entry->begin != saved.begin) {
        throw_invalid("'{}': the header disagrees with the manifest about tensor '{}'", file.path(), name);
      }
    }
  }
  if (count != file.header().entries.size()) {
    throw_invalid("'{}' has {} tensors, but the manifest lists {}", file.path(), file.header().entries.size(),
                  count);
  }
}

/// The checksum of `size` bytes from `offset` on.
std::uint64_t checksum_in(const InputFile& file, std::uint64_t offset, std::uint64_t size) {
  Checksum checksum;
  file.read(offset, size, [&](BytesView part) { checksum.add(part); });
  return checksum.finish();
}

void check_saved_file(const Disk& disk, const std::string& folder, const std::string& name,
                      const Manifest& manifest) {
  const SavedFile& saved = manifest.files.at(name);
  const std::string path = folder + "/" + name;
  const std::int64_t size = disk.file_size(path);
  if (size < 0) throw_invalid("'{}' is missing", path);
  if (static_cast<std::uint64_t>(size) != saved.bytes) {
    throw_invalid("'{}' has {} bytes, but the manifest says {}: it is {}", path, size, saved.bytes,
                  static_cast<std::uint64_t>(size) < saved.bytes ? "truncated" : "damaged");
  }
  if (name == kIndexFile) {
    const std::string text = disk.read_file(path, saved.bytes);
    if (checksum_of(std::as_bytes(std::span(text))) != saved.head_checksum)
      throw_invalid("'{}': its checksum does not match: it is damaged", path);
    return;
  }
  // Reads the header before it is mapped, so that a sector that cannot be read is an Error.
  if (checksum_in(*disk.open(path), 0, saved.head_bytes) != saved.head_checksum)
    throw_invalid("'{}': the checksum of its header does not match: it is damaged", path);
  const MappedFile file(path);
  if (file.head().size() != saved.head_bytes) {
    throw_invalid("'{}': its header has {} bytes, but the manifest says {}: it is damaged", path,
                  file.head().size(), saved.head_bytes);
  }
  check_header_entries(file, name, manifest);
}

}  // namespace

std::vector<Committed> Directory::committed() const {
  std::vector<Committed> all;
  for (const std::string& name : disk_.list(path_)) {
    if (auto one = parse_step_name(name)) all.push_back(std::move(*one));
  }
  std::sort(all.begin(), all.end(), [](const Committed& a, const Committed& b) {
    return std::tie(a.step, a.attempt) > std::tie(b.step, b.attempt);
  });
  return all;
}

std::string Directory::partial_name(std::int64_t step, std::uint64_t token) {
  return step_name(step, 1) + std::string(kPartialMark) + checksum_text(token);
}

std::string Directory::commit(const std::string& partial, std::int64_t step) const {
  int attempt = 1;
  for (const Committed& one : committed()) {
    if (one.step == step) attempt = std::max(attempt, one.attempt + 1);
  }
  const std::string name = step_name(step, attempt);
  try {
    disk_.rename(path_of(partial), path_of(name));
    disk_.replace_file(path_of("latest"), name + "\n");
  } catch (...) {
    // A save that failed must not be found by a later restore. If the partial folder still exists, then the target is
    // the checkpoint of another process.
    std::error_code error;
    const bool renamed = !std::filesystem::exists(path_of(partial), error) && !error;
    if (renamed) withdraw(name);
    throw;
  }
  return name;
}

void Directory::delete_old(const Retention& retention, const std::string& newest) const {
  const std::vector<Committed> all = committed();
  std::set<std::string> kept{newest};
  std::vector<std::pair<double, std::string>> ranking;
  std::set<std::string> damaged;
  int last = 0;
  for (const Committed& one : all) {
    try {
      const Manifest manifest = parse_manifest(
          disk_.read_file(path_of(one.name) + "/" + kManifestFile, kMostManifestBytes), one.name);
      if (last++ < retention.keep_last) kept.insert(one.name);
      if (manifest.metric && !std::isnan(*manifest.metric))
        ranking.emplace_back(retention.lower_is_better ? *manifest.metric : -*manifest.metric, one.name);
    } catch (const Error&) {
      damaged.insert(one.name);
    }
  }
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (std::size_t i = 0; i < ranking.size() && i < static_cast<std::size_t>(retention.keep_best); ++i)
    kept.insert(ranking[i].second);
  bool above_a_kept_one = false;
  for (auto one = all.rbegin(); one != all.rend(); ++one) {
    above_a_kept_one = above_a_kept_one || kept.contains(one->name);
    if (kept.contains(one->name) || (above_a_kept_one && damaged.contains(one->name))) continue;
    move_to_trash(one->name);
  }
}

void Directory::move_to_trash(const std::string& name) const {
  const std::string trash = path_of(std::string(kTrashPrefix) + name);
  disk_.remove(trash);
  disk_.rename(path_of(name), trash);
  disk_.remove(trash);
}

void Directory::withdraw(const std::string& name) const {
  const std::string trash = path_of(std::string(kTrashPrefix) + name);
  try {
    disk_.rename(path_of(name), trash);
  } catch (const Error&) {
    disk_.discard(&Disk::remove, path_of(name));
  }
  disk_.discard(&Disk::remove, trash);
}

std::vector<std::string> Directory::leftovers() const {
  std::vector<std::string> names = disk_.list(path_);
  std::erase_if(names, [](const std::string& name) {
    const bool partial = name.starts_with(kStepPrefix) && name.find(kPartialMark) != std::string::npos;
    return !partial && !name.starts_with(kTrashPrefix);
  });
  return names;
}

void Directory::delete_leftovers() const {
  std::optional<Error> failure;
  for (const std::string& name : leftovers()) {
    try {
      disk_.remove(path_of(name));
    } catch (const Error& error) {
      if (!failure) failure = error;
    }
  }
  if (failure) throw Error(*failure);
}

Manifest open_manifest(const Disk& disk, const std::string& folder) {
  const std::string path = folder + "/" + kManifestFile;
  if (disk.file_size(path) < 0) throw_invalid("'{}' is missing: the checkpoint was not completed", path);
  Manifest manifest = parse_manifest(disk.read_file(path, kMostManifestBytes), fmt::format("'{}'", path));
  for (const auto& [name, file] : manifest.files) check_saved_file(disk, folder, name, manifest);
  return manifest;
}

void verify_data(const Disk& disk, const std::string& folder, const Manifest& manifest, std::size_t first,
                 std::size_t stride) {
  std::map<std::string, std::unique_ptr<MappedFile>> files;  // have no descriptor
  std::unique_ptr<InputFile> input;                          // of the file `open`
  std::string open;
  std::size_t number = 0;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const SavedBox& saved : tensor.boxes) {
      if (number++ % stride != first) continue;
      auto& file = files[saved.file];
      if (!file) file = std::make_unique<MappedFile>(folder + "/" + saved.file);
      if (std::exchange(open, saved.file) != saved.file) input = disk.open(file->path());
      const HeaderEntry* entry = file->find(saved.key);
      const std::uint64_t data_start = file->header().data_start;
      if (entry == nullptr ||
          checksum_in(*input, data_start + entry->begin, entry->end - entry->begin) != saved.checksum) {
        throw_invalid(
            "'{}': the checksum of tensor '{}' does not match: the file is damaged, or belongs to another "
            "checkpoint",
            file->path(), name);
      }
    }
  }
}

namespace {

/// What the holder has written; another process may replace it meanwhile.
std::string holder_named_in(const Descriptor& file) {
  std::array<char, 256> bytes;
  const ssize_t got = ::pread(file.get(), bytes.data(), bytes.size(), 0);
  const std::string_view all(bytes.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  const std::string_view line = all.substr(0, all.find('\n'));
  return line.empty() ? "another process" : std::string(line);
}

}  // namespace

std::string DirectoryLock::take(const std::string& directory, const std::string& holder) {
  if (file_) return "";
  const std::string path = directory + "/lock";
  Descriptor file =
      Descriptor::not_inherited([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666); });
  if (!file) throw_disk_error("create", path, errno);
  if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      throw_invalid(
          "{} writes its checkpoints to '{}' too, so this CheckpointManager must not: end that job or "
          "destroy that manager first, or choose another directory",
          holder_named_in(file), directory);
    }
    return fmt::format("the directory '{}' cannot be locked ({}): make sure that no other job writes to it",
                       directory, std::generic_category().message(errno));
  }
  const std::string line = holder + "\n";
  // Only the text of an error depends on it, so a full disk does not matter here.
  if (::ftruncate(file.get(), 0) == 0) {
    [[maybe_unused]] const ssize_t written = ::pwrite(file.get(), line.data(), line.size(), 0);
  }
  file_ = std::move(file);
  return "";
}

std::string describe_holder(const std::string& rank) {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host = {'?'};
  return fmt::format("{} of process {} on {}", rank, ::getpid(), host.data());
}

void PreparedDirectory::before_save() {
  if (!prepared_) {
    directory_.disk().make_folder(directory_.path());
    const std::string warning = lock_.take(directory_.path(), describe_holder(rank_));
    if (!warning.empty()) log_.warning(warning);
    prepared_ = true;
  } else if (!failed_) {
    return;
  }
  failed_ = false;
  try {
    directory_.delete_leftovers();
  } catch (const Error& error) {
    log_.warning(fmt::format("leftovers of failed saves stay: {}", error.message()));
  }
}

void PreparedDirectory::before_restore() const {
  delete_dead_leftovers();
  warn_if_read_only();
}

/// Every process that writes here holds the lock, so what is left while no process holds it belongs to dead ones.
void PreparedDirectory::delete_dead_leftovers() const {
  try {
    if (prepared_ || directory_.leftovers().empty()) return;
    DirectoryLock lock;
    // A warning says that this file system has no locks.
    if (lock.take(directory_.path(), describe_holder(rank_)).empty()) directory_.delete_leftovers();
  } catch (const Error& error) {  // another process writes, or this one must not: restoring needs neither
    log_.debug(fmt::format("leftovers of earlier saves stay: {}", error.message()));
  }
}

/// A program that only restores needs no more than read access; another one should not train first.
void PreparedDirectory::warn_if_read_only() const {
  try {
    directory_.disk().check_writable(directory_.path());
  } catch (const Error& error) {
    log_.warning(
        fmt::format("checkpoints can be restored only, and saving one will fail: {}", error.message()));
  }
}

}  // namespace torchspan::checkpoint
