#include "collective/channels/algorithms.h"

#include <algorithm>
#include <cstring>

namespace torchspan::collective::channels {
namespace {

constexpr std::size_t kLeastChunk = std::size_t{64} << 10;
constexpr std::size_t kMostChunk = std::size_t{512} << 10;
/// Chunks that a rank sends before it needs the first one of the others.
constexpr std::size_t kAhead = 2;
constexpr std::size_t kSmallBroadcast = std::size_t{64} << 10;
/// Two ranks exchange all data up to this size: as many bytes as slices, in one step instead of two.
constexpr std::size_t kSmallForTwo = std::size_t{512} << 10;
/// What the network carries in one step's latency, roughly.
constexpr std::size_t kStepBytes = std::size_t{64} << 10;

/// Whether it is faster if every rank reduces everything, which costs more bytes but one step less.
bool reduces_everywhere(std::size_t bytes, std::size_t ranks) {
  if (ranks == 2) return bytes <= kSmallForTwo;
  return bytes * (ranks - 1) * (ranks - 2) / ranks <= kStepBytes;
}

/// A range of bytes, cut into chunks.
struct Slice {
  std::size_t begin = 0, end = 0, chunk = 1;

  std::size_t chunks() const { return (end - begin + chunk - 1) / chunk; }
  std::size_t at(std::size_t index) const { return begin + index * chunk; }
  std::size_t size(std::size_t index) const { return std::min(chunk, end - at(index)); }
};

/// Slices of whole elements, one for each rank.
std::vector<Slice> slices_of(std::size_t bytes, std::size_t element, std::size_t ranks) {
  const std::size_t count = bytes / element;
  const std::size_t chunk = std::clamp(bytes / ranks / 4, kLeastChunk, kMostChunk) / element * element;
  std::vector<Slice> slices;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    slices.push_back({count * rank / ranks * element, count * (rank + 1) / ranks * element, chunk});
  }
  return slices;
}

std::size_t most_chunks(const std::vector<Slice>& slices) {
  std::size_t most = 0;
  for (const Slice& slice : slices) most = std::max(most, slice.chunks());
  return most;
}

/// Numbers of the parts: chunk i of what is to be reduced, and of results. A lane carries both.
std::uint32_t given(std::size_t chunk) { return static_cast<std::uint32_t>(2 * chunk); }
std::uint32_t reduced(std::size_t chunk) { return static_cast<std::uint32_t>(2 * chunk + 1); }

/// The other ranks, beginning with the next: ranks that do the same at the same time differ in their order.
template <class Visit>
void for_others(const Mesh& mesh, Visit visit) {
  for (int step = 1; step < mesh.size(); ++step) visit((mesh.rank() + step) % mesh.size());
}

/// Reduces `size` bytes of this rank and the same part of all others.
void reduce_part(Mesh& mesh, std::uint32_t part, std::span<const std::byte> mine, std::byte* target,
                 const Reduction& reduction) {
  std::vector<Buffer> received(static_cast<std::size_t>(mesh.size()));
  std::vector<const std::byte*> sources(received.size());
  sources[static_cast<std::size_t>(mesh.rank())] = mine.data();
  for_others(mesh, [&](int from) {
    Buffer& data = received[static_cast<std::size_t>(from)];
    data = mesh.take(from, part, mine.size());
    sources[static_cast<std::size_t>(from)] = data.data;
  });
  reduction.kernel({sources, {&target, 1}, mine.size() / reduction.element, sources.size()});
}

void reduce_everywhere(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  for_others(mesh, [&](int to) { mesh.send(to, given(0), data); });
  reduce_part(mesh, given(0), data, data.data(), reduction);
}

void send_chunk(Mesh& mesh, const std::vector<Slice>& slices, std::size_t chunk, BytesView data) {
  for_others(mesh, [&](int to) {
    const Slice& its = slices[static_cast<std::size_t>(to)];
    if (chunk < its.chunks()) mesh.send(to, given(chunk), data.subspan(its.at(chunk), its.size(chunk)));
  });
}

void take_results(Mesh& mesh, const std::vector<Slice>& slices, std::size_t chunk, MutableBytes data) {
  for_others(mesh, [&](int from) {
    const Slice& its = slices[static_cast<std::size_t>(from)];
    if (chunk >= its.chunks()) return;
    const Buffer result = mesh.take(from, reduced(chunk), its.size(chunk));
    std::memcpy(data.data() + its.at(chunk), result.data, result.size);
  });
}

}  // namespace

void all_reduce(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  mesh.begin_operation();
  const auto ranks = static_cast<std::size_t>(mesh.size());
  if (reduces_everywhere(data.size(), ranks)) return reduce_everywhere(mesh, data, reduction);
  const std::vector<Slice> slices = slices_of(data.size(), reduction.element, ranks);
  const Slice& own = slices[static_cast<std::size_t>(mesh.rank())];
  const std::size_t chunks = most_chunks(slices);
  for (std::size_t step = 0; step < chunks + 2 * kAhead; ++step) {
    if (step < chunks) send_chunk(mesh, slices, step, data);
    if (step >= kAhead && step - kAhead < own.chunks()) {
      const std::size_t chunk = step - kAhead;
      const MutableBytes mine = data.subspan(own.at(chunk), own.size(chunk));
      reduce_part(mesh, given(chunk), mine, mine.data(), reduction);
      for_others(mesh, [&](int to) { mesh.send(to, reduced(chunk), mine); });
    }
    if (step >= 2 * kAhead) take_results(mesh, slices, step - 2 * kAhead, data);
  }
}

void reduce_scatter(Mesh& mesh, BytesView data, MutableBytes mine, const Reduction& reduction) {
  mesh.begin_operation();
  const auto ranks = static_cast<std::size_t>(mesh.size());
  const std::vector<Slice> slices = slices_of(data.size(), reduction.element, ranks);
  const Slice& own = slices[static_cast<std::size_t>(mesh.rank())];
  const std::size_t chunks = most_chunks(slices);
  for (std::size_t step = 0; step < chunks + kAhead; ++step) {
    if (step < chunks) send_chunk(mesh, slices, step, data);
    if (step < kAhead || step - kAhead >= own.chunks()) continue;
    const std::size_t chunk = step - kAhead;
    reduce_part(mesh, given(chunk), data.subspan(own.at(chunk), own.size(chunk)),
                mine.data() + chunk * own.chunk, reduction);
  }
}

void exchange(Mesh& mesh, const std::vector<BytesView>& outgoing, const std::vector<MutableBytes>& incoming) {
  mesh.begin_operation();
  const auto slice = [](std::size_t size) { return Slice{0, size, kMostChunk}; };
  std::size_t chunks = 0;
  for (const BytesView& data : outgoing) chunks = std::max(chunks, slice(data.size()).chunks());
  for (const MutableBytes& data : incoming) chunks = std::max(chunks, slice(data.size()).chunks());
  const auto self = static_cast<std::size_t>(mesh.rank());
  if (incoming[self].data() != outgoing[self].data() && !incoming[self].empty()) {
    std::memcpy(incoming[self].data(), outgoing[self].data(), incoming[self].size());
  }
  for (std::size_t step = 0; step < chunks + kAhead; ++step) {
    for_others(mesh, [&](int to) {
      const BytesView data = outgoing[static_cast<std::size_t>(to)];
      const Slice its = slice(data.size());
      if (step < its.chunks()) mesh.send(to, given(step), data.subspan(its.at(step), its.size(step)));
    });
    if (step < kAhead) continue;
    const std::size_t chunk = step - kAhead;
    for_others(mesh, [&](int from) {
      const MutableBytes data = incoming[static_cast<std::size_t>(from)];
      const Slice its = slice(data.size());
      if (chunk >= its.chunks()) return;
      const Buffer received = mesh.take(from, given(chunk), its.size(chunk));
      std::memcpy(data.data() + its.at(chunk), received.data, received.size);
    });
  }
}

namespace {

void broadcast_by_tree(Mesh& mesh, MutableBytes data, int root) {
  const int ranks = mesh.size(), place = (mesh.rank() - root + ranks) % ranks;
  const auto rank_at = [&](int other) { return (other + root) % ranks; };
  int mask = 1;
  for (; mask < ranks; mask *= 2) {
    if ((place & mask) == 0) continue;
    const Buffer received = mesh.take(rank_at(place - mask), given(0), data.size());
    std::memcpy(data.data(), received.data, received.size);
    break;
  }
  for (mask /= 2; mask > 0; mask /= 2) {
    if (place + mask < ranks) mesh.send(rank_at(place + mask), given(0), data);
  }
}

}  // namespace

void broadcast(Mesh& mesh, MutableBytes data, int root) {
  mesh.begin_operation();
  if (data.size() <= kSmallBroadcast) return broadcast_by_tree(mesh, data, root);
  const int ranks = mesh.size(), place = (mesh.rank() - root + ranks) % ranks;
  const Slice slice{0, data.size(), kMostChunk};
  for (std::size_t chunk = 0; chunk < slice.chunks(); ++chunk) {
    const MutableBytes piece = data.subspan(slice.at(chunk), slice.size(chunk));
    if (place > 0) {
      const Buffer received = mesh.take((mesh.rank() + ranks - 1) % ranks, given(chunk), piece.size());
      std::memcpy(piece.data(), received.data, received.size);
    }
    if (place + 1 < ranks) mesh.send((mesh.rank() + 1) % ranks, given(chunk), piece);
  }
}

}  // namespace torchspan::collective::channels
