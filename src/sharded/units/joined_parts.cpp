#include "sharded/units/joined_parts.h"

#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "collective/api/maps_peers.h"

namespace torchspan::sharded {
namespace {

std::size_t page_size() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

collective::MapsPeers* maps_of(const collective::Group& group) {
  return dynamic_cast<collective::MapsPeers*>(group.backend().get());
}

bool in_pages(const FlatLayout& layout, std::size_t item) {
  for (const Segment& segment : layout.segments()) {
    if (static_cast<std::size_t>(segment.chunk) * item % page_size() != 0) return false;
  }
  return true;
}

}  // namespace

std::int64_t JoinedParts::step(const collective::Group& group, at::ScalarType dtype) {
  if (group.size() == 1 || maps_of(group) == nullptr) return 0;
  return static_cast<std::int64_t>(page_size() / c10::elementSize(dtype));
}

std::unique_ptr<JoinedParts> JoinedParts::make(const collective::Group& group, const at::Tensor& part,
                                               const FlatLayout& layout) {
  const auto item = static_cast<std::size_t>(part.element_size());
  collective::MapsPeers* const maps = maps_of(group);
  if (maps == nullptr || !in_pages(layout, item)) return nullptr;
  const std::vector<std::byte*> parts = maps->peer_memory_of(part);
  if (parts.empty()) return nullptr;
  std::unique_ptr<JoinedParts> joined(new JoinedParts);
  const at::NoGradGuard no_grad;
  const at::Tensor mapped = at::full({1}, joined->map(parts, item, layout) ? 1 : 0, at::kInt);
  group.all_reduce(mapped, collective::kMin).wait();
  if (mapped.item<int>() == 0) return nullptr;
  return joined;
}

/// With an old size of 0, mremap() maps shared pages a second time.
bool JoinedParts::map(const std::vector<std::byte*>& parts, std::size_t item, const FlatLayout& layout) {
  const std::size_t bytes = static_cast<std::size_t>(layout.size()) * item;
  void* const range = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return false;
  data_ = range;
  bytes_ = bytes;
  for (const Segment& segment : layout.segments()) {
    const std::size_t chunk = static_cast<std::size_t>(segment.chunk) * item;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
      std::byte* const from = parts[rank] + static_cast<std::size_t>(segment.part) * item;
      std::byte* const to =
          static_cast<std::byte*>(range) + static_cast<std::size_t>(segment.begin) * item + rank * chunk;
      if (::mremap(from, 0, chunk, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) return false;
      if (::mprotect(to, chunk, PROT_READ) != 0) return false;
    }
  }
  return true;
}

void JoinedParts::forget() const { ::madvise(data_, bytes_, MADV_DONTNEED); }

JoinedParts::~JoinedParts() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

}  // namespace torchspan::sharded
