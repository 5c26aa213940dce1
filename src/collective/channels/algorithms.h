#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include <torchspan/core/bytes.h>

#include "collective/channels/mesh.h"
#include "collective/kernels.h"

/// Collective operations on memory, over a Mesh. All ranks call them with equal sizes. Borders between pieces
/// depend on the size and the number of ranks only.
namespace torchspan::collective::channels {

using MutableBytes = std::span<std::byte>;

struct Reduction {
  Kernel kernel = nullptr;
  std::size_t element = 1;  ///< bytes of an element
};

/// Reduces in place, in the order of ranks 0 to P-1. Small data: every rank receives and reduces all. Large
/// data: rank i reduces slice i, chunk by chunk, and sends the result to all.
void all_reduce(Mesh& mesh, MutableBytes data, const Reduction& reduction);
/// `mine`: this rank's part, 1/P of the data.
void reduce_scatter(Mesh& mesh, BytesView data, MutableBytes mine, const Reduction& reduction);
/// all_reduce() into the data of `root` only. Small data: every rank sends all to `root`. Large data: rank i reduces
/// slice i and sends the result to `root`.
void reduce(Mesh& mesh, MutableBytes data, int root, const Reduction& reduction);
/// `all` gets the data of all ranks, which have equal sizes, by rank.
void all_gather(Mesh& mesh, BytesView mine, MutableBytes all);
/// Sends outgoing[r] to rank r and receives incoming[r] from it; copies this rank's own.
void exchange(Mesh& mesh, const std::vector<BytesView>& outgoing, const std::vector<MutableBytes>& incoming);
/// exchange() of parts of at most `largest` bytes, which is 0 unless all ranks send to all. Small parts of many ranks pass
/// through others: about log2 P messages instead of P - 1.
void all_to_all(Mesh& mesh, const std::vector<BytesView>& outgoing, const std::vector<MutableBytes>& incoming,
                std::size_t largest);
/// Small data go down a binomial tree, large data through a chain of all ranks, chunk by chunk.
void broadcast(Mesh& mesh, MutableBytes data, int root);

}  // namespace torchspan::collective::channels
