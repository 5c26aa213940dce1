#include "collective/channels/many_ranks.h"

#include <algorithm>
#include <cstring>

namespace torchspan::collective::channels {
namespace {

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

}  // namespace

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

void reduce_by_gathering(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  if (data.empty()) return;
  const Bytes blocks = gather_by_doubling(mesh, data, 0);
  reduce_blocks(
      blocks, data.data(), data.size(), reduction, [&](int i) { return (mesh.rank() + i) % mesh.size(); },
      data.size());
}

void reduce_by_exchanging(Mesh& mesh, MutableBytes data, const Reduction& reduction) {
  const int ranks = mesh.size(), rank = mesh.rank();
  const std::size_t elements = data.size() / reduction.element;
  const auto border = [&](int of) {
    return elements * static_cast<std::size_t>(of) / static_cast<std::size_t>(ranks) * reduction.element;
  };
  // Blocks have the size of the longest slice. Block i begins as slice (rank + i), and ends as that of rank (rank - i).
  const std::size_t block = (elements / static_cast<std::size_t>(ranks) + 1) * reduction.element;
  Bytes blocks(block * static_cast<std::size_t>(ranks));
  for (int i = 0; i < ranks; ++i) {
    const int to = (rank + i) % ranks;
    const std::size_t begin = border(to), size = border(to + 1) - begin;
    if (size != 0)
      std::memcpy(blocks.data() + static_cast<std::size_t>(i) * block, data.data() + begin, size);
  }
  std::uint32_t step = 0;
  for (int distance = 1; distance < ranks; distance *= 2, ++step) {
    Bytes passed;
    for (int i = distance; i < ranks; ++i) {
      if ((i & distance) == 0) continue;
      const auto from = blocks.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * block);
      passed.insert(passed.end(), from, from + static_cast<std::ptrdiff_t>(block));
    }
    mesh.send((rank + distance) % ranks, part_of_step(0, step), passed);
    const Buffer received =
        mesh.take((rank - distance + ranks) % ranks, part_of_step(0, step), passed.size());
    std::size_t at = 0;
    for (int i = distance; i < ranks; ++i) {
      if ((i & distance) == 0) continue;
      std::memcpy(blocks.data() + static_cast<std::size_t>(i) * block, received.data + at, block);
      at += block;
    }
  }
  Bytes mine(block);
  reduce_blocks(
      blocks, mine.data(), border(rank + 1) - border(rank), reduction,
      [&](int i) { return (rank - i + ranks) % ranks; }, block);
  const Bytes results = gather_by_doubling(mesh, mine, kAfterExchange);
  for (int i = 0; i < ranks; ++i) {
    const int of = (rank + i) % ranks;
    const std::size_t begin = border(of), size = border(of + 1) - begin;
    if (size != 0)
      std::memcpy(data.data() + begin, results.data() + static_cast<std::size_t>(i) * block, size);
  }
}

}  // namespace torchspan::collective::channels
