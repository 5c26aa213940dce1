#include "data_parallel/buckets/bucket_plan.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

namespace torchspan::data_parallel {
namespace {

constexpr double kMebibyte = 1024.0 * 1024.0;

/// Bytes by bucket, in the order of reduction.
std::vector<std::size_t> limits_of(const DataParallelOptions& options) {
  std::vector<double> mebibytes = options.bucket_cap_mb_list;
  if (mebibytes.empty()) mebibytes = {options.first_bucket_mb, options.bucket_cap_mb};
  std::vector<std::size_t> limits;
  for (const double size : mebibytes)
    limits.push_back(std::max<std::size_t>(static_cast<std::size_t>(size * kMebibyte), 1));
  return limits;
}

}  // namespace

BucketPlan::BucketPlan(Log& log, const ParameterSlots& slots, const DataParallelOptions& options,
                       const collective::Group& group)
    : log_(log), slots_(slots), options_(options), group_(group) {
  std::vector<std::size_t> order(slots_.count());
  std::iota(order.rbegin(), order.rend(), 0U);
  buckets_ = build(order);
}

std::shared_ptr<Buckets> BucketPlan::build(const std::vector<std::size_t>& order) const {
  std::vector<at::Tensor> tensors;
  AssignmentOptions assignment{.order = order};
  for (const Parameter& parameter : slots_.replicas()[0]) {
    tensors.push_back(parameter.tensor);
    assignment.sparse.push_back(parameter.sparse_gradient);
  }
  return std::make_shared<Buckets>(
      slots_.replicas(), compute_bucket_assignment_by_size(tensors, limits_of(options_), assignment), group_);
}

bool BucketPlan::needs_rebuild() const {
  return !rebuilt_ && options_.rebuild_buckets && (options_.static_graph || !options_.find_unused_parameters);
}

void BucketPlan::rebuild(const Order& by, Rebuilt done) {
  const std::size_t count = slots_.count();
  at::Tensor order = at::empty({static_cast<std::int64_t>(count)}, at::kLong);
  std::vector<bool> placed(count);
  auto* next = order.data_ptr<std::int64_t>();
  for (const std::uint32_t parameter : by.arrived) {
    placed[parameter] = true;
    *next++ = parameter;
  }
  for (std::size_t parameter = count; parameter-- > 0;) {
    if (!placed[parameter]) *next++ = static_cast<std::int64_t>(parameter);
  }
  group_.broadcast(order, by.leader)
      .add_done_callback([this, done = std::move(done), order,
                          pass_stream = by.pass_stream](const Future<at::Tensor>& agreed) {
        try {
          agreed.wait();
          const auto* first = order.data_ptr<std::int64_t>();
          build_together(std::vector<std::size_t>(first, first + order.numel()), pass_stream, done);
        } catch (...) {
          done(std::current_exception(), nullptr);
        }
      });
}

/// A rank may have no memory for new buckets beside the old ones: then all ranks keep the old ones.
void BucketPlan::build_together(const std::vector<std::size_t>& order,
                                const std::optional<c10::Stream>& pass_stream, const Rebuilt& done) {
  const at::NoGradGuard no_grad;
  const StreamScope on_pass(pass_stream);
  std::shared_ptr<Buckets> built;
  std::string reason;
  try {
    built = build(order);
  } catch (...) {
    reason = describe(std::current_exception()).text;
  }
  at::Tensor failed = at::full({1}, built ? 0 : group_.rank() + 1, at::kInt);
  group_.all_reduce(failed, collective::kMax)
      .add_done_callback([this, done, built, failed, reason](const Future<at::Tensor>& agreed) mutable {
        try {
          agreed.wait();
          const int unbuilt = *failed.data_ptr<std::int32_t>();
          if (unbuilt > 0) {
            built.reset();
            warn_not_rebuilt(unbuilt - 1, reason);
          }
          rebuilt_ = true;
          done(nullptr, std::move(built));
        } catch (...) {
          done(std::current_exception(), nullptr);
        }
      });
}

void BucketPlan::warn_not_rebuilt(int rank, const std::string& reason) const {
  log_.warning(
      fmt::format("gradient buckets keep the order of parameters, because rank {} cannot allocate new ones "
                  "next to them{}; training continues, with less overlap of communication and backward. "
                  "Give the group more memory, or set rebuild_buckets to false",
                  group_.ranks()[static_cast<std::size_t>(rank)], reason.empty() ? "" : ": " + reason));
}

}  // namespace torchspan::data_parallel
