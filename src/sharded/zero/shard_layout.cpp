#include "sharded/zero/shard_layout.h"

#include <algorithm>
#include <map>

#include <torchspan/core/error.h>

namespace torchspan::sharded {

std::vector<BucketShards::Piece> BucketShards::pieces(int rank) const {
  std::vector<Piece> mine;
  for (const Place& place : places) {
    const std::int64_t from = std::max(begin(rank), place.offset);
    const std::int64_t to = std::min(end(rank), place.offset + place.count);
    if (from < to) mine.push_back({place.parameter, from - place.offset, to - place.offset, from});
  }
  return mine;
}

std::vector<BucketShards> shards_of(const std::vector<std::vector<std::string>>& buckets,
                                    const std::vector<data_parallel::Parameter>& parameters, int ranks) {
  std::map<std::string, std::size_t> index;
  for (std::size_t i = 0; i < parameters.size(); ++i) index.emplace(parameters[i].name, i);
  std::vector<BucketShards> all;
  for (const auto& names : buckets) {
    BucketShards bucket;
    bucket.ranks = ranks;
    for (const std::string& name : names) {
      const auto found = index.find(name);
      if (found == index.end())
        throw Error(ErrorKind::kInvalid, "a bucket contains the unknown parameter '" + name + "'");
      const std::int64_t count = parameters[found->second].tensor.numel();
      bucket.places.push_back({found->second, bucket.count, count});
      bucket.count += count;
    }
    bucket.chunk = bucket.count / ranks;
    all.push_back(std::move(bucket));
  }
  return all;
}

}  // namespace torchspan::sharded
