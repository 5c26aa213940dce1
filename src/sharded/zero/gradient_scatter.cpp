#include "sharded/zero/gradient_scatter.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::sharded {
namespace {

/// Returns the whole pages of a contiguous tensor on the CPU to the system, in memory that processes share or not. The
/// values there are then lost, and usually zero; writing takes memory again. Nothing for tensors on a device.
void release_pages(const at::Tensor& values) {
  if (!values.is_cpu() || values.nbytes() == 0) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<std::uintptr_t>(values.data_ptr());
  const std::uintptr_t begin = (data + page - 1) / page * page, end = (data + values.nbytes()) / page * page;
  if (begin >= end) return;
  auto* const pages = reinterpret_cast<void*>(begin);
  // The first is for shared memory and fails for other memory, the second is for that.
  if (::madvise(pages, end - begin, MADV_REMOVE) != 0) ::madvise(pages, end - begin, MADV_DONTNEED);
}

}  // namespace

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
      if (found == index.end()) throw_invalid("a bucket contains the unknown parameter '" + name + "'");
      const std::int64_t count = parameters[found->second].tensor.numel();
      bucket.places.push_back({found->second, bucket.count, count});
      bucket.count += count;
    }
    bucket.chunk = bucket.count / ranks;
    all.push_back(std::move(bucket));
  }
  return all;
}

Future<at::Tensor> GradientScatter::reduce(const data_parallel::GradientBucket& bucket,
                                           const collective::Group& group) {
  const at::NoGradGuard no_grad;
  const BucketShards& shards = layout_.at(bucket.index);
  bool left_over = false, closed = false;
  {
    MutexLock lock(mutex_);
    closed = closed_;
    if (bucket.index == 0 && !bucket.given_up) ++begun_;
    left_over = begun_ > 1 && !bucket.given_up;
    buffers_[bucket.index] = bucket.buffer;
  }
  const at::ScalarType dtype = bucket.buffer.scalar_type();
  // As the reducer without a hook: half overflows if it is summed before it is divided.
  const bool divides_last = bucket.divisor == group.size() && dtype != at::kHalf && dtype != at::kComplexHalf;
  if (!divides_last && bucket.divisor != 1) bucket.buffer.mul_(1 / bucket.divisor);
  const collective::ReduceOp reduction = divides_last ? collective::kAvg : collective::kSum;
  if (closed) return group.all_reduce(bucket.buffer, reduction);
  const std::int64_t even = shards.ranks * shards.chunk;
  Future<at::Tensor> last;
  if (shards.remainder() > 0 || even == 0)  // also for parameters without elements
    last = group.all_reduce(bucket.buffer.narrow(0, even, shards.remainder()), reduction);
  if (even > 0) last = group.reduce_scatter(bucket.buffer.narrow(0, 0, even), reduction);
  // Operations complete in order, so the remainder is reduced when this runs.
  return last.then([self = shared_from_this(), buffer = bucket.buffer, left_over, even,
                    begin = shards.begin(group.rank()),
                    chunk = shards.chunk](const Future<at::Tensor>& done) {
    const at::NoGradGuard none;
    const at::Tensor part = done.wait();
    const at::Tensor own = buffer.narrow(0, begin, chunk);
    if (even > 0 && part.data_ptr() != own.data_ptr()) own.copy_(part.view({chunk}));
    if (left_over) {
      throw_invalid(
          "the gradients of the previous reduction were neither stepped nor cleared, and only parts of them "
          "are averages; call step() or zero_grad() of the ZeroRedundancyOptimizer before the next reduced "
          "backward pass, and accumulate under no_sync()");
    }
    if (self->divides_ && even > 0) {
      release_pages(buffer.narrow(0, 0, begin));
      release_pages(buffer.narrow(0, begin + chunk, even - begin - chunk));
    }
    return buffer;
  });
}

at::Tensor GradientScatter::buffer(std::size_t bucket) const {
  MutexLock lock(mutex_);
  return buffers_.at(bucket);
}

std::uint64_t GradientScatter::begun() const {
  MutexLock lock(mutex_);
  return begun_;
}

void GradientScatter::clear() {
  MutexLock lock(mutex_);
  begun_ = 0;
}

void GradientScatter::close() {
  MutexLock lock(mutex_);
  closed_ = true;
}

}  // namespace torchspan::sharded
