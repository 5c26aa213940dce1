#include "rpc/references/program_names.h"

#include <algorithm>
#include <span>
#include <utility>

#include <torchspan/detail/wire/frame.h>

namespace torchspan::rpc {
namespace {

/// How many names of source files are kept: more than a program has.
constexpr std::size_t kFiles = 1024;
constexpr std::size_t kLongestFile = 256;

}  // namespace

Bytes encode_site(const SourceLocation& site) {
  if (site.line() == 0) return {};
  ByteWriter writer;
  writer.put(static_cast<std::uint32_t>(site.line()));
  const std::string_view file = file_of(site.file_name());
  writer.put_bytes(std::as_bytes(std::span(file.data(), std::min(file.size(), kLongestFile))));
  return writer.take();
}

void ProgramNames::read_site(BytesView site, Origin& origin) {
  if (site.empty()) return;
  ByteReader reader(site);
  origin.line = reader.get<std::uint32_t>();
  if (reader.left() > kLongestFile)
    throw_invalid("a creation's place in the program has too long a file name");
  const BytesView name = reader.get_bytes(reader.left());
  std::string file(name.size(), '\0');
  std::ranges::transform(name, file.begin(), [](std::byte byte) { return static_cast<char>(byte); });
  MutexLock lock(mutex_);
  const auto known = files_.find(file);
  if (known != files_.end()) {
    origin.file = known->c_str();
  } else if (files_.size() < kFiles) {
    origin.file = files_.insert(std::move(file)).first->c_str();
  } else {
    origin.line = 0;
  }
}

void ProgramNames::add_type(std::uint64_t tag, const std::string& name) {
  MutexLock lock(mutex_);
  types_.try_emplace(tag, name);
}

void ProgramNames::check_and_add_type(std::uint64_t tag, const std::string& name) {
  MutexLock lock(mutex_);
  if (types_.contains(tag) || wire::digest(name) != tag) return;
  types_.emplace(tag, name);
}

bool ProgramNames::knows_type(std::uint64_t tag) const {
  MutexLock lock(mutex_);
  return types_.contains(tag);
}

std::unordered_map<std::uint64_t, std::string> ProgramNames::types() const {
  MutexLock lock(mutex_);
  return types_;
}

}  // namespace torchspan::rpc
