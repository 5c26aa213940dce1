#include "pipeline/runtime/replica_sums.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "pipeline/runtime/gradient_fields.h"
#include "pipeline/runtime/moved.h"

namespace torchspan::pipeline {
namespace {

/// Adds a replica's share to a sum; both may be undefined or sparse.
void add_share(at::Tensor& sum, const at::Tensor& gradient, double weight) {
  if (!gradient.defined()) return;
  if (sum.defined() && !sum.is_sparse() && !gradient.is_sparse()) {
    sum.add_(gradient, weight);
  } else {
    sum = sum_of_gradients(sum, gradient * weight);
  }
}

}  // namespace

ReplicaSums::ReplicaSums(const LocalPipeline& local, const StepBegin& begin, const ReplicaBegins& begins)
    : local_(local),
      id_(begin.id),
      micro_batches_(static_cast<int>(begin.rows.size())),
      no_sync_(begin.no_sync),
      carries_(begin.carries),
      begins_(begins),
      exchanges_(local.replica_buckets.size()),
      left_(exchanges_.size()) {
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket)
    exchanges_[bucket].backwards =
        micro_batches_ * static_cast<int>(local.replica_buckets[bucket].ranges.size());
}

ReplicaSums::~ReplicaSums() {
  if (!begun_) return;
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    const std::vector<at::Tensor>& before = exchanges_[bucket].before;
    for (std::size_t i = 0; i < before.size(); ++i)
      local_.replica_buckets[bucket].parameters[i].mutable_grad() = before[i];
  }
}

void ReplicaSums::begin() {
  begun_ = true;
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    for (const at::Tensor& parameter : local_.replica_buckets[bucket].parameters)
      exchanges_[bucket].before.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
}

void ReplicaSums::backward_ended(int range) {
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    const std::vector<int>& ranges = local_.replica_buckets[bucket].ranges;
    if (std::find(ranges.begin(), ranges.end(), range) == ranges.end()) continue;
    if (--exchanges_[bucket].backwards == 0) send(bucket);
  }
}

void ReplicaSums::ties_ended() {
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    if (local_.replica_buckets[bucket].tied) send(bucket);
  }
}

/// The gradient of this step. With those of steps with no_sync, if there are any: they are means over all replicas
/// already, so they count equally in every replica, whatever its rows in this step are.
at::Tensor ReplicaSums::gradient_to_send(std::size_t bucket, std::size_t parameter) const {
  const torch::autograd::AutoGradMode no_grad(false);
  at::Tensor& field = local_.replica_buckets[bucket].parameters[parameter].mutable_grad();
  at::Tensor gradient = std::exchange(field, at::Tensor());
  const at::Tensor& before = exchanges_[bucket].before[parameter];
  if (!carries_ || !before.defined()) return gradient;
  return sum_of_gradients(gradient, before * (1 / begins_.own_weight()));
}

void ReplicaSums::send(std::size_t bucket) {
  if (no_sync_) {
    --left_;
    return;
  }
  if (carries_ && !begins_.complete()) return waiting_.push_back(bucket);
  const ReplicaBucket& owned = local_.replica_buckets[bucket];
  Part mine{begins_.own_rows(), {}};
  for (std::size_t i = 0; i < owned.parameters.size(); ++i)
    mine.gradients.push_back(gradient_to_send(bucket, i));
  if (owned.owner == local_.grid.mine) return add_part(bucket, owned.owner, std::move(mine));
  post(owned.owner, bucket, mine.rows, std::move(mine.gradients));
}

void ReplicaSums::post(int replica, std::size_t bucket, std::int64_t rows,
                       std::vector<at::Tensor> gradients) const {
  local_.post_to_replica(
      replica,
      ReplicaGradients{id_, static_cast<std::int32_t>(bucket), local_.grid.mine, rows, std::move(gradients),
                       local_.grid.devices.of_worker(local_.rank_in_replica(replica))});
}

void ReplicaSums::rows_known() {
  for (const std::size_t bucket : std::exchange(waiting_, {})) send(bucket);
}

bool ReplicaSums::fits(const ReplicaGradients& event) const {
  const auto bucket = static_cast<std::size_t>(event.bucket);
  if (event.bucket < 0 || bucket >= exchanges_.size() || event.replica < 0 || event.rows < 1) return false;
  if (event.replica >= local_.grid.count() || event.replica == local_.grid.mine) return false;
  const ReplicaBucket& owned = local_.replica_buckets[bucket];
  const bool is_part = owned.owner == local_.grid.mine;
  const Exchange& exchange = exchanges_[bucket];
  if (exchange.done || (!is_part && event.replica != owned.owner)) return false;
  if (is_part && exchange.parts.contains(event.replica)) return false;
  if (event.gradients.size() != owned.parameters.size()) return false;
  for (std::size_t i = 0; i < owned.parameters.size(); ++i) {
    const at::Tensor& gradient = event.gradients[i];
    const at::Tensor& parameter = owned.parameters[i];
    if (!gradient.defined()) continue;
    if (gradient.sizes() != parameter.sizes() || gradient.scalar_type() != parameter.scalar_type())
      return false;
  }
  return true;
}

void ReplicaSums::accept(ReplicaGradients& event) {
  if (!fits(event)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("gradients of bucket {} from replica {} do not belong to this worker, of "
                            "replica {}",
                            event.bucket, event.replica, local_.grid.mine));
  }
  const auto bucket = static_cast<std::size_t>(event.bucket);
  const ReplicaBucket& owned = local_.replica_buckets[bucket];
  for (std::size_t i = 0; i < event.gradients.size(); ++i) {
    at::Tensor& gradient = event.gradients[i];  // it may have arrived on the CPU
    if (gradient.defined()) gradient = moved(std::move(gradient), owned.parameters[i].device());
  }
  if (owned.owner == local_.grid.mine)
    return add_part(bucket, event.replica, {event.rows, std::move(event.gradients)});
  exchanges_[bucket].sums = std::move(event.gradients);
  exchanges_[bucket].done = true;
  --left_;
}

void ReplicaSums::add_part(std::size_t bucket, int replica, Part part) {
  const torch::autograd::AutoGradMode no_grad(false);
  Exchange& exchange = exchanges_[bucket];
  exchange.parts[replica] = std::move(part);
  if (static_cast<int>(exchange.parts.size()) < local_.grid.count()) return;
  double total = 0;
  for (const auto& [from, here] : exchange.parts) total += static_cast<double>(here.rows);
  exchange.sums.resize(local_.replica_buckets[bucket].parameters.size());
  for (auto& [from, here] : exchange.parts) {
    for (std::size_t i = 0; i < exchange.sums.size(); ++i)
      add_share(exchange.sums[i], here.gradients[i], static_cast<double>(here.rows) / total);
    here.gradients.clear();
  }
  exchange.parts.clear();
  exchange.done = true;
  --left_;
  for (int other = 0; other < local_.grid.count(); ++other) {
    if (other == local_.grid.mine) continue;
    post(other, bucket, begins_.own_rows(), exchange.sums);
  }
}

void ReplicaSums::finish() {
  if (!std::exchange(begun_, false)) return;
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    Exchange& exchange = exchanges_[bucket];
    for (std::size_t i = 0; i < exchange.before.size(); ++i) {
      const at::Tensor& parameter = local_.replica_buckets[bucket].parameters[i];
      at::Tensor added;
      if (!no_sync_) {
        added = std::move(exchange.sums[i]);
      } else if (parameter.grad().defined()) {
        added = parameter.grad() * begins_.own_weight();
      }
      // The sums contain what they were sent with.
      at::Tensor before = carries_ && !no_sync_ ? at::Tensor() : std::move(exchange.before[i]);
      put_gradient(parameter, std::move(before), std::move(added));
    }
    exchange = Exchange();
  }
}

}  // namespace torchspan::pipeline
