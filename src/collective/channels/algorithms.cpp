#include "collective/channels/algorithms.h"

#include <algorithm>
#include <cstring>

namespace torchspan::collective::channels {
namespace {

// Over many ranks, messages cost more than bytes: the number of those below grows with log2 of the ranks. Bruck et al.,
// "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.

/// Groups with more ranks use these algorithms, where `bytes` of a rank are at most that many.
constexpr int kFewRanks = 8;
constexpr std::size_t kMostToGather = std::size_t{8} << 10;
constexpr std::size_t kMostToExchange = std::size_t{256} << 10;
/// Of the parts of an all-to-all, each of which passes through log2(P) / 2 ranks on average.
constexpr std::size_t kMostToPass = std::size_t{1} << 10;

/// Parts of gather_by_doubling() after those of an exchange; lanes carry two numbers in turn.
constexpr std::uint32_t kAfterExchange = 128;

std::uint32_t part_of_step(std::uint32_t first, std::uint32_t step) { return first + 2 * step; }

/// Reduces blocks of all ranks; block i is that of rank `rank_of`(i).
template <class RankOf>
void reduce_blocks(const Bytes& blocks, std::byte* target, std::size_t bytes, const Reduction& reduction,
                   RankOf rank_of, std::size_t block) {
  std::vector<const std::byte*> sources(blocks.size() / block);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    sources[static_cast<std::size_t>(rank_of(static_cast<int>(i)))] = blocks.data() + i * block;
  }
  reduction.kernel({sources, {&target, 1}, bytes / reduction.element, sources.size()});
}

/// Gathers blocks of equal size: that of rank (r + i) mod P is block i on rank r. About log2 P messages per rank. Follows
/// Mesh::begin_operation(); `part`: numbers of its parts from here on are unused.
Bytes gather_by_doubling(Mesh& mesh, BytesView mine, std::uint32_t part) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const std::size_t block = mine.size();
  Bytes blocks(block * static_cast<std::size_t>(ranks));
  if (block != 0) std::memcpy(blocks.data(), mine.data(), block);
  std::uint32_t step = 0;
  for (int distance = 1; distance < ranks; distance *= 2, ++step) {
    const auto bytes = static_cast<std::size_t>(std::min(distance, ranks - distance)) * block;
    mesh.send((rank - distance + ranks) % ranks, part_of_step(part, step), BytesView(blocks).first(bytes));
    const Buffer received = mesh.take((rank + distance) % ranks, part_of_step(part, step), bytes);
    if (bytes != 0) {
      std::memcpy(blocks.data() + static_cast<std::size_t>(distance) * block, received.data, bytes);
    }
  }
  return blocks;
}

/// Gathers everything, and reduces it in the order of ranks.
void reduce_by_gathering(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  if (data.empty()) return;
  const Bytes blocks = gather_by_doubling(mesh, data, 0);
  reduce_blocks(
      blocks, data.data(), data.size(), reduction, [&](int i) { return (mesh.rank() + i) % mesh.size(); },
      data.size());
}

/// Passes blocks of equal size, of which block i is for rank (r + i) mod P, in about log2 P messages per rank. Block i of
/// the result is from rank (r - i) mod P. Follows Mesh::begin_operation(); parts from kAfterExchange on are unused.
Bytes exchange_by_doubling(Mesh& mesh, Bytes blocks, std::size_t block) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const auto place = [&](int i) { return blocks.data() + static_cast<std::size_t>(i) * block; };
  std::uint32_t step = 0;
  for (int distance = 1; distance < ranks; distance *= 2, ++step) {
    Bytes passed;
    for (int i = distance; i < ranks; ++i) {
      if ((i & distance) != 0) passed.insert(passed.end(), place(i), place(i) + block);
    }
    mesh.send((rank + distance) % ranks, part_of_step(0, step), passed);
    const Buffer received =
        mesh.take((rank - distance + ranks) % ranks, part_of_step(0, step), passed.size());
    std::size_t at = 0;
    for (int i = distance; i < ranks; ++i) {
      if ((i & distance) == 0) continue;
      std::memcpy(place(i), received.data + at, block);
      at += block;
    }
  }
  return blocks;
}

/// The bytes of each rank's slice of `bytes`: whole elements, as even as possible.
class EvenSlices {
 public:
  EvenSlices(std::size_t bytes, std::size_t element, int ranks)
      : elements_(bytes / element), element_(element), ranks_(static_cast<std::size_t>(ranks)) {}
  std::size_t begin(int rank) const { return elements_ * static_cast<std::size_t>(rank) / ranks_ * element_; }
  std::size_t size(int rank) const { return begin(rank + 1) - begin(rank); }
  /// Of the largest slice, at least one element.
  std::size_t most() const { return (elements_ / ranks_ + 1) * element_; }

 private:
  const std::size_t elements_, element_, ranks_;
};

/// Sends slice i to rank i in about log2 P messages, and reduces the own one in the order of ranks, into `mine`.
void reduce_own_slice(Mesh& mesh, BytesView data, std::byte* mine, const Reduction& reduction) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const EvenSlices slices(data.size(), reduction.element, ranks);
  const std::size_t block = slices.most();
  Bytes blocks(block * static_cast<std::size_t>(ranks));
  for (int i = 0; i < ranks; ++i) {
    const int to = (rank + i) % ranks;
    if (slices.size(to) == 0) continue;
    std::memcpy(blocks.data() + static_cast<std::size_t>(i) * block, data.data() + slices.begin(to),
                slices.size(to));
  }
  blocks = exchange_by_doubling(mesh, std::move(blocks), block);
  reduce_blocks(
      blocks, mine, slices.size(rank), reduction, [&](int i) { return (rank - i + ranks) % ranks; }, block);
}

/// Every rank reduces its slice, and the results are gathered: about 2 log2 P messages.
void reduce_by_exchanging(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const EvenSlices slices(data.size(), reduction.element, ranks);
  Bytes mine(slices.most());
  reduce_own_slice(mesh, data, mine.data(), reduction);
  const Bytes results = gather_by_doubling(mesh, mine, kAfterExchange);
  for (int i = 0; i < ranks; ++i) {
    const int of = (rank + i) % ranks;
    if (slices.size(of) == 0) continue;
    std::memcpy(data.data() + slices.begin(of), results.data() + static_cast<std::size_t>(i) * slices.most(),
                slices.size(of));
  }
}

constexpr std::size_t kLeastChunk = std::size_t{64} << 10;
constexpr std::size_t kMostChunk = std::size_t{512} << 10;
/// Chunks that a rank sends before it needs the first one of the others.
constexpr std::size_t kAhead = 2;
/// Ranks to which one of many sends before it takes what the others sent; less than kFewRanks + 1.
constexpr std::size_t kPartners = 8;
constexpr std::size_t kSmallReduce = std::size_t{64} << 10;
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

/// As all_reduce() of large data, but every rank has only a few partners at a time, so that few ranks send to one: in
/// turn s, rank r sends to rank r + s, and takes what rank r - s sent it kPartners turns ago. Turns continue from chunk
/// to chunk; those of the results are kAhead chunks behind.
void reduce_in_turns(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const std::vector<Slice> slices =
      slices_of(data.size(), reduction.element, static_cast<std::size_t>(ranks));
  const auto slice = [&](int of) -> const Slice& { return slices[static_cast<std::size_t>(of)]; };
  const Slice& own = slice(rank);
  const std::size_t partners = static_cast<std::size_t>(ranks) - 1;
  const std::size_t turns = (most_chunks(slices) + kAhead) * partners;
  std::vector<Buffer> received(static_cast<std::size_t>(ranks));
  const auto send_turn = [&](std::size_t turn) {
    const int to = (rank + 1 + static_cast<int>(turn % partners)) % ranks;
    const std::size_t chunk = turn / partners;
    if (chunk < slice(to).chunks()) {
      mesh.send(to, given(chunk), data.subspan(slice(to).at(chunk), slice(to).size(chunk)));
    }
    if (chunk >= kAhead && chunk - kAhead < own.chunks()) {
      mesh.send(to, reduced(chunk - kAhead), data.subspan(own.at(chunk - kAhead), own.size(chunk - kAhead)));
    }
  };
  const auto take_turn = [&](std::size_t turn) {
    const int from = (rank - 1 - static_cast<int>(turn % partners) + ranks) % ranks;
    const std::size_t chunk = turn / partners;
    if (chunk < own.chunks()) {
      received[static_cast<std::size_t>(from)] = mesh.take(from, given(chunk), own.size(chunk));
      if (turn % partners == partners - 1) {
        std::vector<const std::byte*> sources;
        for (const Buffer& buffer : received) sources.push_back(buffer.data);
        std::byte* const target = data.data() + own.at(chunk);
        sources[static_cast<std::size_t>(rank)] = target;
        reduction.kernel({sources, {&target, 1}, own.size(chunk) / reduction.element, sources.size()});
      }
    }
    if (chunk >= kAhead && chunk - kAhead < slice(from).chunks()) {
      const std::size_t result = chunk - kAhead;
      const Buffer theirs = mesh.take(from, reduced(result), slice(from).size(result));
      std::memcpy(data.data() + slice(from).at(result), theirs.data, theirs.size);
    }
  };
  for (std::size_t turn = 0; turn < turns + kPartners; ++turn) {
    if (turn < turns) send_turn(turn);
    if (turn >= kPartners) take_turn(turn - kPartners);
  }
}

}  // namespace

void all_reduce(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  mesh.begin_operation();
  const auto ranks = static_cast<std::size_t>(mesh.size());
  if (mesh.size() > kFewRanks) {
    if (data.size() <= kMostToGather) return reduce_by_gathering(mesh, data, reduction);
    if (data.size() <= kMostToExchange) return reduce_by_exchanging(mesh, data, reduction);
    return reduce_in_turns(mesh, data, reduction);
  }
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
  if (mesh.size() > kFewRanks && data.size() <= kMostToExchange) {
    return reduce_own_slice(mesh, data, mine.data(), reduction);
  }
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

void reduce(Mesh& mesh, MutableBytes data, int root, const Reduction& reduction) {
  mesh.begin_operation();
  const bool gets = mesh.rank() == root;
  if (data.size() <= kSmallReduce) {
    if (gets) return reduce_part(mesh, given(0), data, data.data(), reduction);
    return mesh.send(root, given(0), data);
  }
  const auto ranks = static_cast<std::size_t>(mesh.size());
  const std::vector<Slice> slices = slices_of(data.size(), reduction.element, ranks);
  const Slice& own = slices[static_cast<std::size_t>(mesh.rank())];
  const std::size_t chunks = most_chunks(slices);
  Bytes result(gets ? 0 : own.chunk);
  for (std::size_t step = 0; step < chunks + 2 * kAhead; ++step) {
    if (step < chunks) send_chunk(mesh, slices, step, data);
    if (step >= kAhead && step - kAhead < own.chunks()) {
      const std::size_t chunk = step - kAhead;
      const MutableBytes mine = data.subspan(own.at(chunk), own.size(chunk));
      reduce_part(mesh, given(chunk), mine, gets ? mine.data() : result.data(), reduction);
      if (!gets) mesh.send(root, reduced(chunk), BytesView(result).first(mine.size()));
    }
    if (gets && step >= 2 * kAhead) take_results(mesh, slices, step - 2 * kAhead, data);
  }
}

void all_gather(Mesh& mesh, BytesView mine, MutableBytes all) {
  const auto ranks = static_cast<std::size_t>(mesh.size());
  const std::size_t size = mine.size();
  if (mesh.size() <= kFewRanks || size > kMostToGather) {
    std::vector<MutableBytes> incoming;
    for (std::size_t rank = 0; rank < ranks; ++rank) incoming.push_back(all.subspan(rank * size, size));
    return exchange(mesh, std::vector<BytesView>(ranks, mine), incoming);
  }
  mesh.begin_operation();
  const Bytes blocks = gather_by_doubling(mesh, mine, 0);
  for (std::size_t i = 0; i < ranks && size != 0; ++i) {
    const std::size_t from = (static_cast<std::size_t>(mesh.rank()) + i) % ranks;
    std::memcpy(all.data() + from * size, blocks.data() + i * size, size);
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

void all_to_all(Mesh& mesh, const std::vector<BytesView>& outgoing, const std::vector<MutableBytes>& incoming,
                std::size_t largest) {
  if (mesh.size() <= kFewRanks || largest == 0 || largest > kMostToPass)
    return exchange(mesh, outgoing, incoming);
  mesh.begin_operation();
  const auto ranks = static_cast<std::size_t>(mesh.size()), rank = static_cast<std::size_t>(mesh.rank());
  Bytes blocks(largest * ranks);
  for (std::size_t i = 0; i < ranks; ++i) {
    std::ranges::copy(outgoing[(rank + i) % ranks],
                      blocks.begin() + static_cast<std::ptrdiff_t>(i * largest));
  }
  blocks = exchange_by_doubling(mesh, std::move(blocks), largest);
  for (std::size_t i = 0; i < ranks; ++i) {
    const MutableBytes to = incoming[(rank + ranks - i) % ranks];
    std::ranges::copy(BytesView(blocks).subspan(i * largest, to.size()), to.begin());
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
