#pragma once
#include <cstddef>

#include "collective/channels/algorithms.h"

/// Operations over so many ranks that messages cost more than bytes: their number grows with log2 of the ranks. Bruck
/// et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", 1997.
namespace torchspan::collective::channels {

/// Groups with more ranks use these algorithms, where `bytes` of a rank are at most that many.
inline constexpr int kFewRanks = 8;
inline constexpr std::size_t kMostToGather = std::size_t{8} << 10;
inline constexpr std::size_t kMostToExchange = std::size_t{256} << 10;

/// Gathers blocks of equal size: that of rank (r + i) mod P is block i on rank r. About log2 P messages per rank. Follows
/// Mesh::begin_operation(); `part`: numbers of its parts from here on are unused.
Bytes gather_by_doubling(Mesh& mesh, BytesView mine, std::uint32_t part);
/// Gathers everything, and reduces it in the order of ranks.
void reduce_by_gathering(Mesh& mesh, MutableBytes data, const Reduction& reduction);
/// Sends slice i to rank i in about log2 P messages, reduces the own one in the order of ranks, and gathers the results
/// in as many.
void reduce_by_exchanging(Mesh& mesh, MutableBytes data, const Reduction& reduction);

}  // namespace torchspan::collective::channels
