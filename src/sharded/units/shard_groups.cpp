#include "sharded/units/shard_groups.h"

#include <fmt/format.h>

namespace torchspan::sharded {

ShardGroups::ShardGroups(const collective::Group& group) : all_(group.split(0, group.rank())), copy_(all_) {}

std::string ShardGroups::trouble(int shard_ranks) const {
  if (shard_ranks == 0 || (shard_ranks > 0 && all_.size() % shard_ranks == 0)) return "";
  return fmt::format("shard_ranks is {}, but the group has {} ranks; give 0 or a number that divides it",
                     shard_ranks, all_.size());
}

void ShardGroups::split(int shard_ranks) {
  if (shard_ranks == 0 || shard_ranks == all_.size()) return;
  copy_ = all_.split(all_.rank() / shard_ranks, all_.rank());
  replicas_ = all_.split(all_.rank() % shard_ranks, all_.rank());
}

void ShardGroups::abort(const Error& cause) const {
  all_.abort(cause);
  if (!replicas_) return;
  copy_.abort(cause);
  replicas_->abort(cause);
}

void ShardGroups::await_readers() const {
  if (in_place_) copy_.barrier();
}

}  // namespace torchspan::sharded
