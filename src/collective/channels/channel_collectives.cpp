#include "collective/channels/channel_collectives.h"

#include <algorithm>

#include "collective/channels/algorithms.h"

namespace torchspan::collective::channels {
namespace {

MutableBytes memory_of(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

Reduction reduction_of(const at::Tensor& tensor, ReduceOp reduction) {
  return {find_kernel(tensor.scalar_type(), reduction), static_cast<std::size_t>(tensor.element_size())};
}

/// Cuts memory into pieces of these sizes.
std::vector<MutableBytes> cut(const at::Tensor& tensor, const std::vector<std::int64_t>& sizes) {
  std::vector<MutableBytes> pieces;
  MutableBytes left = memory_of(tensor);
  for (const std::int64_t size : sizes) {
    pieces.push_back(left.first(static_cast<std::size_t>(size)));
    left = left.subspan(static_cast<std::size_t>(size));
  }
  return pieces;
}

/// The most bytes that a rank sends to another one; 0 if not all ranks send to all, as in a gather.
std::size_t largest_if_all_send(const ByteCounts& counts, std::size_t ranks) {
  std::int64_t largest = 0;
  for (std::size_t from = 0; from < ranks; ++from) {
    for (std::size_t to = 0; to < ranks; ++to) {
      if (from != to && counts.at(from, to) == 0) return 0;
      largest = std::max(largest, counts.at(from, to));
    }
  }
  return static_cast<std::size_t>(largest);
}

}  // namespace

ChannelCollectives::ChannelCollectives(std::shared_ptr<WorldLink> world, std::vector<int> ranks,
                                       MeshOptions options)
    : world_(std::move(world)),
      ranks_(std::move(ranks)),
      options_(options),
      mesh_(world_, ranks_, options_) {}

void ChannelCollectives::watch(std::function<void()> wake,
                               std::function<std::optional<Error>()> interrupted) {
  mesh_.inbox().on_failure(std::move(wake));
  if (interrupted) mesh_.inbox().check_while_waiting(std::move(interrupted));
}

void ChannelCollectives::all_reduce(at::Tensor tensor, ReduceOp reduction) {
  channels::all_reduce(mesh_, memory_of(tensor), reduction_of(tensor, reduction));
}

bool ChannelCollectives::reduce_scatter(const at::Tensor& tensor, const at::Tensor& part,
                                        ReduceOp reduction) {
  channels::reduce_scatter(mesh_, memory_of(tensor), memory_of(part), reduction_of(tensor, reduction));
  return true;
}

bool ChannelCollectives::reduce(const at::Tensor& tensor, int root, ReduceOp reduction) {
  channels::reduce(mesh_, memory_of(tensor), root, reduction_of(tensor, reduction));
  return true;
}

void ChannelCollectives::broadcast(at::Tensor tensor, int root) {
  channels::broadcast(mesh_, memory_of(tensor), root);
}

void ChannelCollectives::all_gather(at::Tensor mine, at::Tensor all) {
  channels::all_gather(mesh_, memory_of(mine), memory_of(all));
}

bool ChannelCollectives::all_gather_varied(const std::vector<at::Tensor>& all) {
  std::vector<MutableBytes> incoming;
  for (const at::Tensor& tensor : all) incoming.push_back(memory_of(tensor));
  const BytesView mine = incoming[static_cast<std::size_t>(mesh_.rank())];
  exchange(mesh_, std::vector<BytesView>(ranks_.size(), mine), incoming);
  return true;
}

void ChannelCollectives::all_to_all(at::Tensor mine, at::Tensor all, const ByteCounts& counts) {
  std::vector<BytesView> outgoing;
  for (const MutableBytes& piece : cut(mine, counts.sent_by(mesh_.rank()))) outgoing.emplace_back(piece);
  channels::all_to_all(mesh_, outgoing, cut(all, counts.received_by(mesh_.rank())),
                       largest_if_all_send(counts, ranks_.size()));
}

std::unique_ptr<BlockingCollectives> ChannelCollectives::split(const std::vector<int>& members,
                                                               std::uint64_t number) {
  std::vector<int> part;
  for (const int member : members) part.push_back(ranks_[static_cast<std::size_t>(member)]);
  MeshOptions options = options_;
  options.rounds.split = number;
  return connect_channels(world_, part, options);
}

std::unique_ptr<BlockingCollectives> connect_channels(const std::shared_ptr<WorldLink>& world,
                                                      const std::vector<int>& ranks, MeshOptions options) {
  if (ranks.size() == 1) return nullptr;
  return std::make_unique<ChannelCollectives>(world, ranks, options);
}

}  // namespace torchspan::collective::channels
