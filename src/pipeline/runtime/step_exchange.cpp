#include "pipeline/runtime/step_exchange.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>
#include <utility>

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/micro_batches.h"

namespace torchspan::pipeline {
namespace {

/// A bucket closes when it holds as many bytes.
constexpr std::size_t kBucketBytes = std::size_t{16} << 20;

/// A parameter of this worker and the layer ranges that use it.
struct UsedParameter {
  at::Tensor tensor;
  std::set<int> ranges;
  bool tied = false;
};

bool has_tie(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (const at::Tensor& copy : tie.copies) {
      if (copy.is_same(parameter)) return true;
    }
  }
  return false;
}

/// Each parameter once, in the order of layers.
std::vector<UsedParameter> used_parameters(const LocalPipeline& local) {
  std::vector<UsedParameter> all;
  std::map<const void*, std::size_t> places;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    const auto& module = local.layers[layer].module;
    if (!module) continue;
    std::set<int> ranges;
    for (std::size_t order = 0; order < local.uses.size(); ++order) {
      if (static_cast<std::size_t>(local.uses[order].layer) == layer)
        ranges.insert(local.plan.layer_range_of(static_cast<int>(order)));
    }
    for (const at::Tensor& parameter : module->parameters()) {
      const auto [place, fresh] = places.emplace(parameter.unsafeGetTensorImpl(), all.size());
      if (fresh) all.push_back({parameter, {}, has_tie(local, parameter)});
      all[place->second].ranges.insert(ranges.begin(), ranges.end());
    }
  }
  return all;
}

/// Gives each parameter an owner: the largest first, each to the replica that has the fewest bytes.
std::vector<int> assign_owners(const std::vector<UsedParameter>& parameters, int replicas) {
  std::vector<std::size_t> order(parameters.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return parameters[a].tensor.nbytes() > parameters[b].tensor.nbytes();
  });
  std::vector<std::size_t> load(static_cast<std::size_t>(replicas), 0);
  std::vector<int> owners(parameters.size());
  for (const std::size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    *least += parameters[i].tensor.nbytes();
    owners[i] = static_cast<int>(least - load.begin());
  }
  return owners;
}

/// The sum of two gradients of one parameter; either may be undefined or sparse.
at::Tensor sum_of_gradients(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.is_sparse() && !b.is_sparse() ? b + a : a + b;
}

/// Adds a replica's share to a sum; both may be undefined or sparse.
void add_share(at::Tensor& sum, const at::Tensor& gradient, double weight) {
  if (!gradient.defined()) return;
  if (sum.defined() && !sum.is_sparse() && !gradient.is_sparse()) {
    sum.add_(gradient, weight);
  } else {
    sum = sum_of_gradients(sum, gradient * weight);
  }
}

/// A gradient, or nothing, on the device of a copy of its parameter.
at::Tensor moved_to(const at::Tensor& copy, at::Tensor gradient) {
  return gradient.defined() ? moved(std::move(gradient), copy.device()) : gradient;
}

}  // namespace

void put_gradient(const at::Tensor& parameter, at::Tensor before, at::Tensor gradient) {
  const torch::autograd::AutoGradMode no_grad(false);
  at::Tensor& field = parameter.mutable_grad();
  if (!gradient.defined()) {
    field = std::move(before);
  } else if (!before.defined()) {
    field = std::move(gradient);
  } else if (before.is_sparse() && !gradient.is_sparse()) {
    field = gradient + before;
  } else {
    field = before.add_(gradient);
  }
}

std::vector<ReplicaBucket> make_replica_buckets(const LocalPipeline& local) {
  if (local.grid.count() <= 1) return {};
  const std::vector<UsedParameter> parameters = used_parameters(local);
  const std::vector<int> owners = assign_owners(parameters, local.grid.count());
  std::vector<ReplicaBucket> buckets;
  // The bucket that grows and its bytes, by ranges and owner; tied parameters have no ranges.
  std::map<std::pair<std::vector<int>, int>, std::pair<std::size_t, std::size_t>> open;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const UsedParameter& parameter = parameters[i];
    const std::vector<int> ranges(parameter.ranges.begin(), parameter.ranges.end());
    const std::pair key{parameter.tied ? std::vector<int>() : ranges, owners[i]};
    const auto [place, fresh] = open.emplace(key, std::pair(buckets.size(), std::size_t{0}));
    auto& [bucket, bytes] = place->second;
    if (fresh || bytes >= kBucketBytes) {
      bucket = buckets.size();
      bytes = 0;
      buckets.push_back({key.first, parameter.tied, owners[i], {}});
    }
    buckets[bucket].parameters.push_back(parameter.tensor);
    bytes += parameter.tensor.nbytes();
  }
  return buckets;
}

void announce_to_replicas(const LocalPipeline& local, const StepBegin& begin) {
  const ReplicaBegin mine{
      begin.id, local.grid.mine, begin.kind, total_rows(begin.rows), begin.gradient_scale, begin.no_sync};
  for (int replica = 0; replica < local.grid.count(); ++replica) {
    if (replica != local.grid.mine)
      local.post_to_all(local.grid.ranks[static_cast<std::size_t>(replica)], mine);
  }
}

TiedGradients::TiedGradients(const LocalPipeline& local, StepId id)
    : local_(local), id_(id), exchanges_(local.ties.size()) {}

TiedGradients::~TiedGradients() {
  if (!begun_) return;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    const std::vector<at::Tensor>& before = exchanges_[tie].before;
    for (std::size_t copy = 0; copy < before.size(); ++copy) {
      if (before[copy].defined()) local_.ties[tie].copies[copy].mutable_grad() = before[copy];
    }
  }
}

void TiedGradients::begin() {
  begun_ = true;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    for (const at::Tensor& copy : local_.ties[tie].copies)
      exchanges_[tie].before.push_back(std::exchange(copy.mutable_grad(), at::Tensor()));
  }
}

void TiedGradients::send() {
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    const Tie& local_tie = local_.ties[tie];
    if (local_tie.copies.empty()) continue;
    at::Tensor mine;
    for (const at::Tensor& copy : local_tie.copies) {
      at::Tensor gradient = std::exchange(copy.mutable_grad(), at::Tensor());
      mine = sum_of_gradients(mine, moved_to(local_tie.copies.front(), std::move(gradient)));
    }
    const int first = local_tie.workers.front();
    if (first == local_.me) {
      add_part(tie, local_.me, std::move(mine));
    } else {
      post(first, tie, std::move(mine));
    }
  }
}

void TiedGradients::accept(TiedGradient& event) {
  const auto tie = static_cast<std::size_t>(event.tie);
  const bool known = event.tie >= 0 && tie < exchanges_.size() && !local_.ties[tie].copies.empty();
  const std::vector<int> none;
  const std::vector<int>& workers = known ? local_.ties[tie].workers : none;
  const bool sent_by_it = std::find(workers.begin(), workers.end(), event.worker) != workers.end() &&
                          event.worker != local_.me &&
                          (workers.front() == local_.me || workers.front() == event.worker);
  const bool fits = sent_by_it && (!event.gradient.defined() ||
                                   event.gradient.sizes() == local_.ties[tie].copies.front().sizes());
  if (!fits) {
    throw_invalid("a gradient of tied parameter {} from worker {} does not belong to this worker", event.tie,
                  event.worker);
  }
  at::Tensor gradient = moved_to(local_.ties[tie].copies.front(), std::move(event.gradient));
  if (workers.front() == local_.me) return add_part(tie, event.worker, std::move(gradient));
  exchanges_[tie].sum = std::move(gradient);
  exchanges_[tie].done = true;
}

void TiedGradients::add_part(std::size_t tie, int worker, at::Tensor gradient) {
  const torch::autograd::AutoGradMode no_grad(false);
  const Tie& local_tie = local_.ties[tie];
  Exchange& exchange = exchanges_[tie];
  exchange.parts[worker] = std::move(gradient);
  if (exchange.parts.size() < local_tie.workers.size()) return;
  for (const int one : local_tie.workers)
    exchange.sum = sum_of_gradients(exchange.sum, exchange.parts.at(one));
  exchange.parts.clear();
  exchange.done = true;
  for (const int other : local_tie.workers) {
    if (other != local_.me) post(other, tie, exchange.sum);
  }
}

void TiedGradients::post(int to, std::size_t tie, at::Tensor gradient) const {
  const std::uint32_t rank = local_.rank_of(to);
  local_.post(rank, TiedGradient{id_, static_cast<std::int32_t>(tie), local_.me, std::move(gradient),
                                 local_.grid.devices.of_worker(rank)});
}

bool TiedGradients::complete() const {
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    if (!local_.ties[tie].copies.empty() && !exchanges_[tie].done) return false;
  }
  return true;
}

void TiedGradients::finish() {
  const torch::autograd::AutoGradMode no_grad(false);
  begun_ = false;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    for (std::size_t copy = 0; copy < local_.ties[tie].copies.size(); ++copy) {
      const at::Tensor sum = moved_to(local_.ties[tie].copies[copy], exchanges_[tie].sum);
      at::Tensor before = std::move(exchanges_[tie].before[copy]);
      // An optimizer may change `.grad` in place.
      const bool becomes_field = sum.defined() && !before.defined();
      put_gradient(local_.ties[tie].copies[copy], std::move(before), becomes_field ? sum.clone() : sum);
    }
    exchanges_[tie] = Exchange();
  }
}

StepExchange::StepExchange(const LocalPipeline& local, const StepBegin& begin)
    : local_(local),
      begin_(begin),
      rows_{{local.grid.mine, total_rows(begin.rows)}},
      tied_(local, begin.id),
      exchanges_(local.replica_buckets.size()),
      left_(exchanges_.size()) {
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    exchanges_[bucket].backwards =
        static_cast<int>(begin.rows.size() * local.replica_buckets[bucket].ranges.size());
  }
  if (local.grid.count() <= 1) return;
  for (const BuiltLayer& layer : local.layers) {
    if (!layer.module) continue;
    for (const auto& module : layer.module->modules()) {
      if (auto* statistics = dynamic_cast<StepStatistics*>(module.get())) modules_.push_back(statistics);
    }
  }
}

StepExchange::~StepExchange() {
  if (!begun_) return;
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    const std::vector<at::Tensor>& before = exchanges_[bucket].before;
    for (std::size_t i = 0; i < before.size(); ++i)
      local_.replica_buckets[bucket].parameters[i].mutable_grad() = before[i];
  }
}

void StepExchange::begin() {
  if (std::exchange(begun_, true)) return;
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    for (const at::Tensor& parameter : local_.replica_buckets[bucket].parameters)
      exchanges_[bucket].before.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
  }
  tied_.begin();
}

void StepExchange::accept(const ReplicaBegin& event) {
  if (event.replica < 0 || event.replica >= local_.grid.count() || event.rows < 1 ||
      rows_.contains(event.replica)) {
    throw_invalid("the beginning of replica {} does not belong to this worker, of replica {}", event.replica,
                  local_.grid.mine);
  }
  const auto refuse = [&](const std::string& difference) {
    throw_invalid(
        "the replicas of pipeline '{}' {} (worker '{}' of replica {} and worker '{}' of replica {}); do the "
        "same in all replicas",
        local_.options.name, difference, local_.worker.name(), local_.grid.mine,
        local_.grid.names_of(local_.me)[static_cast<std::size_t>(event.replica)], event.replica);
  };
  if (event.kind != begin_.kind)
    refuse(fmt::format("call different functions in step {}, {} and {}", begin_.id.step, call_of(begin_.kind),
                       call_of(event.kind)));
  if (event.gradient_scale != begin_.gradient_scale) {
    refuse(fmt::format("have different StepOptions::gradient_scale in step {}, {} and {}", begin_.id.step,
                       begin_.gradient_scale, event.gradient_scale));
  }
  if (event.no_sync != begin_.no_sync)
    refuse(fmt::format("have different StepOptions::no_sync in step {}, {} and {}", begin_.id.step,
                       begin_.no_sync, event.no_sync));
  rows_[event.replica] = event.rows;
  if (!knows_replicas()) return;
  for (const std::size_t bucket : std::exchange(waiting_, {})) send(bucket);
}

/// The rows of this replica's batch over the mean rows of all batches; once all replicas are known.
double StepExchange::own_weight() const {
  double total = 0;
  for (const auto& [replica, rows] : rows_) total += static_cast<double>(rows);
  return static_cast<double>(rows_.at(local_.grid.mine) * local_.grid.count()) / total;
}

void StepExchange::backward_ended(int range) {
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    const std::vector<int>& ranges = local_.replica_buckets[bucket].ranges;
    if (std::find(ranges.begin(), ranges.end(), range) == ranges.end()) continue;
    if (--exchanges_[bucket].backwards == 0) send(bucket);
  }
}

/// The gradient of this step. With those of steps with no_sync, if there are any: they are means over all replicas
/// already, so they count equally in every replica, whatever its rows in this step are.
at::Tensor StepExchange::gradient_to_send(std::size_t bucket, std::size_t parameter) const {
  const torch::autograd::AutoGradMode no_grad(false);
  at::Tensor& field = local_.replica_buckets[bucket].parameters[parameter].mutable_grad();
  at::Tensor gradient = std::exchange(field, at::Tensor());
  const at::Tensor& before = exchanges_[bucket].before[parameter];
  if (!begin_.carries || !before.defined()) return gradient;
  return sum_of_gradients(gradient, before * (1 / own_weight()));
}

void StepExchange::send(std::size_t bucket) {
  if (begin_.no_sync) {
    --left_;
    return;
  }
  if (begin_.carries && !knows_replicas()) return waiting_.push_back(bucket);
  const ReplicaBucket& owned = local_.replica_buckets[bucket];
  Part mine{rows_.at(local_.grid.mine), {}};
  for (std::size_t i = 0; i < owned.parameters.size(); ++i)
    mine.gradients.push_back(gradient_to_send(bucket, i));
  if (owned.owner == local_.grid.mine) return add_part(bucket, owned.owner, std::move(mine));
  post(owned.owner, bucket, mine.rows, std::move(mine.gradients));
}

void StepExchange::post(int replica, std::size_t bucket, std::int64_t rows,
                        std::vector<at::Tensor> gradients) const {
  const std::uint32_t rank = local_.rank_in_replica(replica);
  local_.post(rank, ReplicaGradients{begin_.id, static_cast<std::int32_t>(bucket), local_.grid.mine, rows,
                                     std::move(gradients), local_.grid.devices.of_worker(rank)});
}

bool StepExchange::fits(const ReplicaGradients& event) const {
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

void StepExchange::accept(ReplicaGradients& event) {
  if (!fits(event)) {
    throw_invalid("gradients of bucket {} from replica {} do not belong to this worker, of replica {}",
                  event.bucket, event.replica, local_.grid.mine);
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

void StepExchange::add_part(std::size_t bucket, int replica, Part part) {
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
    post(other, bucket, rows_.at(local_.grid.mine), exchange.sums);
  }
}

void StepExchange::forwards_ended() {
  sends_statistics_ = true;
  if (modules_.empty()) return;
  ReplicaStatistics mine{begin_.id, local_.grid.mine, {}};
  for (const StepStatistics* module : modules_) mine.gathered.push_back(module->gathered());
  for (int other = 0; other < local_.grid.count(); ++other) {
    if (other != local_.grid.mine) local_.post(local_.rank_in_replica(other), mine);
  }
  statistics_[local_.grid.mine] = std::move(mine.gathered);
}

void StepExchange::accept(ReplicaStatistics& event) {
  const bool known = event.replica >= 0 && event.replica < local_.grid.count() &&
                     event.replica != local_.grid.mine && !statistics_.contains(event.replica) &&
                     event.gathered.size() == modules_.size();
  if (!known) {
    throw_invalid(
        "statistics of {} modules from replica {} do not belong to this worker, which has {} such modules in "
        "replica {}",
        event.gathered.size(), event.replica, modules_.size(), local_.grid.mine);
  }
  statistics_[event.replica] = std::move(event.gathered);
}

bool StepExchange::statistics_complete() const {
  return !sends_statistics_ || modules_.empty() ||
         static_cast<int>(statistics_.size()) == local_.grid.count();
}

void StepExchange::backwards_ended() {
  tied_.send();
  tying_ = true;
}

bool StepExchange::advance() {
  if (tying_ && tied_.complete()) {
    tying_ = false;
    tied_.finish();
    for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
      if (local_.replica_buckets[bucket].tied) send(bucket);
    }
  }
  if (tying_ || !sums_complete() || !statistics_complete() || !knows_replicas()) return false;
  if (!std::exchange(sends_statistics_, false)) return true;
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    std::vector<std::vector<at::Tensor>> by_replica;
    for (auto& [replica, gathered] : statistics_) by_replica.push_back(std::move(gathered[i]));
    modules_[i]->set_gathered(by_replica);
  }
  return true;
}

const char* StepExchange::waiting_for() const {
  if (tying_) return "wait for the gradients of tied parameters";
  if (!sums_complete()) return "wait for the gradients of the other replicas";
  if (!statistics_complete()) return "wait for the batch statistics of the other replicas";
  return knows_replicas() ? nullptr : "wait for the other replicas to begin the step";
}

void StepExchange::commit() {
  if (!std::exchange(begun_, false)) return;
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t bucket = 0; bucket < exchanges_.size(); ++bucket) {
    Exchange& exchange = exchanges_[bucket];
    for (std::size_t i = 0; i < exchange.before.size(); ++i) {
      const at::Tensor& parameter = local_.replica_buckets[bucket].parameters[i];
      at::Tensor added;
      if (!begin_.no_sync) {
        added = std::move(exchange.sums[i]);
      } else if (parameter.grad().defined()) {
        added = parameter.grad() * own_weight();
      }
      // The sums contain what they were sent with.
      at::Tensor before = begin_.carries && !begin_.no_sync ? at::Tensor() : std::move(exchange.before[i]);
      put_gradient(parameter, std::move(before), std::move(added));
    }
    exchange = Exchange();
  }
}

}  // namespace torchspan::pipeline
