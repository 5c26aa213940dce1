#include "sharded/units/sharded_model.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "data_parallel/api/agreement.h"
#include "sharded/units/unit_list.h"

namespace torchspan::sharded {
namespace {

/// Collective: throws on all ranks if their modules or options differ, or if one rank has failed.
void agree_on_units(const collective::Group& group, const std::vector<ListedUnit>& units,
                    const FullyShardedOptions& options, const std::string& failure) {
  data_parallel::Agreement mine;
  mine.failure = failure;
  std::string names;
  for (const ListedUnit& unit : units) {
    if (unit.module != nullptr) names += " '" + unit.name + "'";
    for (const auto& part : unit.parts) {
      for (const auto& [name, tensor] : part) mine.add(name, tensor);
    }
  }
  mine.settings = {{"the units", "[" + names + " ]"},
                   {"reshard_after_forward", options.reshard_after_forward ? "true" : "false"},
                   {"prefetch", options.prefetch ? "true" : "false"},
                   {"initial_sync", options.initial_sync ? "true" : "false"}};
  data_parallel::agree(group, mine, "parameters");
}

}  // namespace

ShardedModel::ShardedModel(collective::Group group, FullyShardedOptions options)
    : group_(group.split(0, group.rank())),
      options_(options),
      pool_(std::make_shared<BufferPool>()),
      passes_(std::make_shared<engine::NativeEnginePasses>()) {}

void ShardedModel::divide(torch::nn::Module& module) {
  std::vector<ListedUnit> listed;
  std::string failure;
  try {
    listed = units_of(module);
  } catch (const Error& error) {
    failure = error.message();
  }
  agree_on_units(group_, listed, options_, failure);
  try {
    std::set<std::int64_t> chunks;
    for (const ListedUnit& unit : listed) add(unit, chunks);
    if (!options_.initial_sync) return;
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : module.buffers()) {
      if (buffer.defined()) group_.broadcast(buffer.variable_data(), 0).wait();
    }
  } catch (...) {
    fail("the parameters could not be divided: " + describe(std::current_exception()).text);
    throw;
  }
}

void ShardedModel::add(const ListedUnit& unit, std::set<std::int64_t>& chunks) {
  std::vector<Unit::Part> parts;
  for (const auto& parameters : unit.parts) {
    std::int64_t chunk = FlatParameters::needed_chunk(parameters, group_.size());
    // No two parts of equal length: ranks that run different units get an error instead of other parameters.
    while (!chunks.insert(chunk).second) ++chunk;
    Unit::Part part{std::make_unique<FlatParameters>(parameters, group_, pool_, chunk), nullptr};
    if (options_.initial_sync) part.parameters->broadcast();
    part.parameters->keep_changes();
    part.parameters->free();
    if (part.parameters->trained()) part.gradients = std::make_unique<GradientShards>(*part.parameters);
    parts.push_back(std::move(part));
  }
  units_.push_back(std::make_shared<Unit>(unit.name, std::move(parts), weak_from_this()));
  if (unit.module != nullptr) unit.module->unit = units_.back();
}

void ShardedModel::begin_forward() {
  for (const auto& unit : units_) unit->free_if_idle();
  previous_ = std::exchange(sequence_, {});
  in_forward_ = true;
}

std::shared_ptr<Unit> ShardedModel::begin_unit(const std::shared_ptr<Unit>& unit) {
  unit->acquire();
  if (!in_forward_) return nullptr;  // computed again during backward
  const std::size_t position = sequence_.size();
  sequence_.push_back(unit);
  const bool as_before = position + 1 < previous_.size() && previous_[position] == unit;
  if (options_.prefetch && as_before) previous_[position + 1]->prefetch();
  return position > 0 ? sequence_[position - 1] : nullptr;
}

ShardedModel::Pass& ShardedModel::pass_of(engine::GradientSink& sink) {
  const auto [place, is_new] = running_.try_emplace(sink.end());
  if (!is_new) return place->second;
  sink.after_work(
      [self = shared_from_this(), weak = std::weak_ptr(sink.end())](const engine::PassStatus& status) {
        const auto end = weak.lock();
        if (status.ok() && end) self->finish(end);
      });
  sink.after_pass([self = shared_from_this(), end = sink.end().get()](const engine::PassStatus& status) {
    std::erase_if(self->running_, [&](const auto& one) { return one.first.get() == end; });
    if (!status.ok()) self->fail("its backward pass failed: " + describe(status.error).text);
  });
  return place->second;
}

void ShardedModel::enter_backward(engine::GradientSink& sink, const RecordPtr& record,
                                  const engine::NodePtr& gradients) {
  if (record->entered == sink.end()) return;
  if (!sink.writes_grad_field()) {
    throw Error(
        ErrorKind::kUnsupported,
        "FullyShardedDataParallel keeps gradients in .grad; run backward() instead of a distributed autograd "
        "context");
  }
  Pass& pass = pass_of(sink);
  record->entered = sink.end();
  record->unit->acquire();
  if (gradients) record->unit->add_node(gradients);
  pass.open.emplace_back(record, gradients);
  pass.reduces = pass.reduces || record->synchronize;
  if (options_.prefetch && record->before) record->before->prefetch();
}

void ShardedModel::gradients_ready(UnitGradients& node, const std::vector<at::Tensor>& gradients) {
  const RecordPtr record = node.record;
  Unit& unit = *record->unit;
  if (c10::GradMode::is_enabled()) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("double backward (create_graph) through {} is not supported: its parameters are freed",
                    unit.describe()));
  }
  const auto running = running_.find(record->entered);
  const auto is_node = [&](const auto& open) { return open.second.get() == &node; };
  if (running == running_.end() ||
      std::none_of(running->second.open.begin(), running->second.open.end(), is_node)) {
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("backward reached {} not through a tensor that its forward returned, so its parameters "
                    "were not gathered; return every tensor that the loss depends on",
                    unit.describe()));
  }
  // An inner pass, of a segment of the unit that is computed again, is followed by others or by the end of this one.
  const bool is_whole = passes_->current()->end() == record->entered;
  if (is_whole) {
    std::erase_if(running->second.open, is_node);
    unit.remove_node(node);
    unit.release();
  }
  std::size_t next = 0;
  for (const Unit::Part& part : unit.parts()) {
    if (!part.gradients) continue;
    const std::size_t count = part.parameters->entries().size();
    const std::vector<at::Tensor> mine(gradients.begin() + static_cast<std::ptrdiff_t>(next),
                                       gradients.begin() + static_cast<std::ptrdiff_t>(next + count));
    next += count;
    is_whole && record->synchronize ? reduce(*part.gradients, mine) : part.gradients->add(mine);
  }
}

/// One average runs at a time, which bounds the memory.
void ShardedModel::reduce(GradientShards& gradients, const std::vector<at::Tensor>& whole) {
  if (reducing_ != nullptr) std::exchange(reducing_, nullptr)->wait();
  gradients.reduce(whole);
  reducing_ = &gradients;
}

void ShardedModel::finish(const std::shared_ptr<engine::PassEnd>& end) {
  const auto running = running_.find(end);
  if (running == running_.end()) return;
  const Pass pass = std::exchange(running->second, {});
  for (const auto& [record, node] : pass.open) {  // the pass needed no gradient of a parameter
    if (node) record->unit->remove_node(*node);
    record->unit->release();
  }
  for (const auto& unit : units_) unit->free_if_idle();
  if (!pass.reduces) return;
  for (const auto& unit : units_) {
    for (const Unit::Part& part : unit->parts()) {
      if (part.gradients && part.gradients->has_sum())
        reduce(*part.gradients, std::vector<at::Tensor>(part.parameters->entries().size()));
    }
  }
  commit();
}

/// Collective: a parameter gets its average if a rank has a gradient of it.
void ShardedModel::commit() {
  reducing_ = nullptr;
  std::vector<std::int32_t> used;
  for (const auto& unit : units_) {
    for (const Unit::Part& part : unit->parts()) {
      if (!part.gradients) continue;
      for (std::size_t i = 0; i < part.parameters->entries().size(); ++i)
        used.push_back(part.gradients->used(i) ? 1 : 0);
    }
  }
  if (used.empty()) return;
  const at::Tensor all = at::empty({static_cast<std::int64_t>(used.size())}, at::kInt);
  std::copy(used.begin(), used.end(), all.data_ptr<std::int32_t>());
  group_.all_reduce(all, collective::kMax).wait();
  const std::int32_t* next = all.data_ptr<std::int32_t>();
  for (const auto& unit : units_) {
    for (const Unit::Part& part : unit->parts()) {
      if (!part.gradients) continue;
      part.gradients->commit(next);
      next += part.parameters->entries().size();
    }
  }
}

void ShardedModel::fail(const std::string& reason) noexcept {
  in_forward_ = false;
  reducing_ = nullptr;
  try {
    const int rank = group_.ranks()[static_cast<std::size_t>(group_.rank())];
    group_.abort(
        Error(ErrorKind::kCancelled,
              fmt::format("rank {} failed, and a FullyShardedDataParallel cannot continue after that; build "
                          "the module again and restore a checkpoint: {}",
                          rank, reason)));
    for (const auto& unit : units_) unit->reset();
  } catch (...) {  // the caller reports the failure itself
  }
}

}  // namespace torchspan::sharded
