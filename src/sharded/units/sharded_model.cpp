#include "sharded/units/sharded_model.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/api/agreement.h"
#include "sharded/units/unit.h"

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

namespace {

constexpr std::int64_t kKinds = 8;

}  // namespace

Future<at::Tensor> PassAgreement::send(Word mine) const {
  const at::Tensor words = at::zeros({group_.size()}, at::kLong);
  words.data_ptr<std::int64_t>()[group_.rank()] = mine.number * kKinds + static_cast<std::int64_t>(mine.kind);
  return group_.all_reduce(words, collective::kMax);
}

std::vector<PassAgreement::Word> PassAgreement::exchange(Word mine) const {
  const at::Tensor received = send(mine).wait();
  const auto* codes = received.data_ptr<std::int64_t>();
  std::vector<Word> words;
  for (int rank = 0; rank < group_.size(); ++rank)
    words.push_back({static_cast<Kind>(codes[rank] % kKinds), codes[rank] / kKinds});
  return words;
}

std::optional<Error> PassAgreement::begin_pass(std::int64_t number) {
  if (number <= skipped_) {
    return Error(
        ErrorKind::kInvalid,
        "a backward pass goes through outputs of a step that the ranks skip, because agree() returned "
        "false; run the next step's forward");
  }
  for (;;) {
    std::size_t passes = 0;
    const std::vector<Word> words = exchange({Kind::kPass, number});
    for (std::size_t rank = 0; rank < words.size(); ++rank) {
      const Word& word = words[rank];
      if (word.kind == Kind::kPass) ++passes;
      if (word.kind == Kind::kPass || (word.kind == Kind::kNoPass && word.number < number)) continue;
      const int global = group_.ranks()[rank];
      return Error(ErrorKind::kRemoteFailure,
                   fmt::format(
                       "rank {} runs no backward pass for this forward, so it fails on the other ranks: {}",
                       global,
                       word.kind == Kind::kNoPass ? "an exception ended its step between forward and backward"
                                                  : "it called agree()"))
          .with_worker(fmt::format("rank {}", global));
    }
    if (passes == words.size()) return std::nullopt;  // else all ranks have skipped the forward of a word
  }
}

void PassAgreement::announce_no_pass(std::int64_t number) {
  static_cast<void>(send({Kind::kNoPass, number}));
}

bool PassAgreement::agree(bool ok, std::int64_t number) {
  const auto answers = [](const Word& word) {
    return word.kind == Kind::kAgrees || word.kind == Kind::kDisagrees;
  };
  std::vector<Word> words;
  do {
    words = exchange({ok ? Kind::kAgrees : Kind::kDisagrees, number});
  } while (!std::all_of(words.begin(), words.end(), answers));
  const bool all =
      std::all_of(words.begin(), words.end(), [](const Word& word) { return word.kind == Kind::kAgrees; });
  if (!all) skipped_ = number;
  return all;
}

namespace {

std::string name_of(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "that of the module";
}

/// What is wrong with the options; empty: nothing.
std::string trouble_of(const FullyShardedOptions& options) {
  const MixedPrecision& precision = options.precision;
  for (const auto& dtype : {precision.param_dtype, precision.reduce_dtype, precision.output_dtype}) {
    if (dtype && !at::isFloatingType(*dtype))
      return fmt::format("the mixed precision policy has {}; give floating-point dtypes",
                         c10::toString(*dtype));
  }
  return "";
}

/// The dtype of floating-point tensors; others keep theirs.
at::ScalarType cast_of(at::ScalarType dtype, const std::optional<at::ScalarType>& wanted) {
  return wanted && at::isFloatingType(dtype) ? *wanted : dtype;
}

Error create_graph_error(const Unit& unit) {
  return {ErrorKind::kUnsupported,
          fmt::format(
              "double backward (create_graph) through {} is not supported, because its parameters are freed "
              "before the second pass: use DistributedDataParallel, with a ZeroRedundancyOptimizer",
              unit.describe())};
}

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
                   {"initial_sync", options.initial_sync ? "true" : "false"},
                   {"alone_bytes", std::to_string(options.alone_bytes)},
                   {"overlap_bytes", std::to_string(options.overlap_bytes)},
                   {"mapped_bytes", std::to_string(options.mapped_bytes)},
                   {"param_dtype", name_of(options.precision.param_dtype)},
                   {"reduce_dtype", name_of(options.precision.reduce_dtype)},
                   {"output_dtype", name_of(options.precision.output_dtype)},
                   {"shard_ranks", std::to_string(options.shard_ranks)},
                   {"cast_forward_inputs", options.precision.cast_forward_inputs ? "true" : "false"}};
  data_parallel::agree(group, mine, "parameters");
}

}  // namespace

ShardedModel::ShardedModel(const collective::Group& group, FullyShardedOptions options)
    : groups_(group),
      agreement_(groups_.all()),
      options_(options),
      pool_(std::make_shared<BufferPool>()),
      reductions_(std::make_shared<ReductionQueue>(options.overlap_bytes, pool_)),
      passes_(std::make_shared<engine::NativeEnginePasses>()) {}

std::vector<ListedUnit> ShardedModel::listed_by_all(torch::nn::Module& module, bool complete) {
  std::vector<ListedUnit> listed;
  std::string failure = trouble_of(options_);
  if (failure.empty()) failure = groups_.trouble(options_.shard_ranks);
  try {
    listed = units_of(module, built_);
    if (complete) check_built(listed, built_);
  } catch (const Error& error) {
    failure = error.message();
  }
  agree_on_units(groups_.all(), listed, options_, failure);
  if (lengths_.empty()) groups_.split(options_.shard_ranks);
  return listed;
}

void ShardedModel::divide_unit(torch::nn::Module& unit) {
  std::vector<ListedUnit> listed = listed_by_all(unit, /*complete=*/false);
  for (std::size_t i = 1; i < listed.size(); ++i) {  // the root has no parameters
    if (!listed[i].divided) built_.push_back(divided(listed[i]));
  }
}

void ShardedModel::divide(torch::nn::Module& module) {
  const std::vector<ListedUnit> listed = listed_by_all(module, /*complete=*/true);
  try {
    for (const ListedUnit& unit : listed) {
      units_.push_back(unit.divided ? unit.divided : divided(unit));
      units_.back()->set_place(unit.name, units_.size() - 1);
    }
    built_.clear();
    pool_->clear();  // of what dividing took
    if (!options_.initial_sync) return;
    const at::NoGradGuard no_grad;
    for (const at::Tensor& buffer : module.buffers()) {
      if (buffer.defined()) groups_.all().broadcast(buffer.variable_data(), 0).wait();
    }
  } catch (...) {
    fail("the parameters could not be divided: " + describe(std::current_exception()).text);
    throw;
  }
}

/// No two units have shared segments of equal length: ranks that run different units get an error instead of other
/// parameters.
std::shared_ptr<Unit> ShardedModel::divided(const ListedUnit& unit) {
  std::vector<Unit::Part> parts;
  for (const auto& parameters : unit.parts) {
    std::vector<std::int64_t> counts;
    std::size_t bytes = 0;
    for (const NamedParameter& parameter : parameters) {
      counts.push_back(parameter.tensor.numel());
      bytes += parameter.tensor.nbytes();
    }
    const at::ScalarType dtype = parameters[0].tensor.scalar_type();
    const at::ScalarType compute = cast_of(dtype, options_.precision.param_dtype);
    const bool large = options_.mapped_bytes > 0 && bytes >= options_.mapped_bytes;
    const std::int64_t page = large && compute == dtype ? JoinedParts::step(groups_.copy(), dtype) : 0;
    const auto alone = static_cast<std::int64_t>(options_.alone_bytes / c10::elementSize(dtype));
    FlatLayout layout(
        counts, {groups_.copy().size(), std::max<std::int64_t>(alone, 1), std::max<std::int64_t>(page, 1)},
        lengths_);
    FlatParameters::Terms terms{groups_.copy(), pool_, compute, page > 0};
    Unit::Part part{std::make_unique<FlatParameters>(parameters, std::move(layout), std::move(terms)),
                    nullptr};
    part.parameters->divide(options_.initial_sync ? &groups_.all() : nullptr);
    if (part.parameters->joined() != nullptr) groups_.set_in_place(true);
    if (part.parameters->trained()) {
      part.gradients = std::make_unique<GradientShards>(
          *part.parameters,
          GradientShards::Terms{reductions_, cast_of(dtype, options_.precision.reduce_dtype),
                                groups_.replicas()});
    }
    parts.push_back(std::move(part));
  }
  auto made = std::make_shared<Unit>(unit.name, std::move(parts), weak_from_this());
  if (unit.module != nullptr) unit.module->unit = made;
  return made;
}

void ShardedModel::begin_forward() {
  for (const auto& unit : units_) unit->free_if_idle();
  ++number_;
  previous_ = std::exchange(sequence_, {});
  in_forward_ = true;
}

void ShardedModel::check_wrapped(const Unit& unit) const {
  if (units_.empty()) {
    throw_invalid(
        "{} was divided by a UnitBuilder, and runs before its model: construct a FullyShardedDataParallel of "
        "the whole module, and call that",
        unit.describe());
  }
  if (in_forward_ || !running_.empty() || root()->parts().empty()) return;
  if (root()->in_use() || root()->is_gathered()) return;
  const Unit::Part& part = root()->parts().front();
  throw_invalid(
      "{} runs outside of a forward of its FullyShardedDataParallel, where '{}' and other parameters of the "
      "module are this rank's parts: call the wrapper instead of the module, for example model(x), or run "
      "inside of with_full_parameters()",
      unit.describe(), part.parameters->entries().front().name);
}

std::shared_ptr<Unit> ShardedModel::begin_unit(const std::shared_ptr<Unit>& unit) {
  for (const RecordPtr& outer : forwards_) {
    if (outer) outer->contains_units = true;
  }
  unit->acquire();
  if (!in_forward_) return nullptr;  // computed again during backward
  const std::size_t position = sequence_.size();
  sequence_.push_back(unit);
  const bool as_before = position + 1 < previous_.size() && previous_[position] == unit;
  if (options_.prefetch && as_before) previous_[position + 1]->prefetch();
  return position > 0 ? sequence_[position - 1] : nullptr;
}

void ShardedModel::leave_forward() {
  if (!forwards_.empty()) forwards_.pop_back();
  if (!forwards_.empty()) return;
  if (std::exchange(in_forward_, false)) {
    for (const auto& unit : units_) unit->drop_prefetch();
  }
  if (running_.empty()) groups_.await_readers();
}

ShardedModel::Pass& ShardedModel::pass_of(engine::GradientSink& sink) {
  const auto [place, is_new] = running_.try_emplace(sink.end());
  if (!is_new) return place->second;
  sink.after_work(
      [self = shared_from_this(), weak = std::weak_ptr(sink.end())](const engine::PassStatus& status) {
        const auto end = weak.lock();
        if (!status.ok() || !end) return;
        try {
          self->finish(end);
        } catch (const Error& error) {
          throw self->with_unit_names(error);
        }
      });
  sink.after_pass([self = shared_from_this(), end = sink.end().get()](const engine::PassStatus& status) {
    std::erase_if(self->running_, [&](const auto& one) { return one.first.get() == end; });
    if (!status.ok()) self->fail("its backward pass failed: " + describe(status.error).text);
  });
  return place->second;
}

std::optional<Error> ShardedModel::begin_pass(const engine::GradientSink& sink, ForwardRecord& record) {
  // A pass inside another one computes a part of the module again, on all ranks.
  if (!running_.empty() || record.entered == sink.end()) return std::nullopt;
  if (!c10::GradMode::is_enabled()) return agreement_.begin_pass(record.number);
  record.has_no_pass = true;
  agreement_.announce_no_pass(record.number);
  return create_graph_error(*record.unit);
}

void ShardedModel::outputs_dropped(ForwardRecord& record) noexcept {
  if (record.unit != root() || record.entered || std::exchange(record.has_no_pass, true)) return;
  // Other ranks may be in the pass of another micro-batch, which this rank does not run either.
  if (record.part.kind != StepPart::Kind::kNone)
    return fail("an exception discarded the outputs of its forward" + describe(record.part));
  try {
    agreement_.announce_no_pass(record.number);
  } catch (...) {
    fail("an exception discarded the outputs of its forward, which it could not report: " +
         describe(std::current_exception()).text);
  }
}

bool ShardedModel::agree(bool ok) { return agreement_.agree(ok, number_); }

void ShardedModel::enter_backward(engine::GradientSink& sink, const RecordPtr& record,
                                  const GradientNodes& gradients) {
  if (record->entered == sink.end()) return;
  if (!sink.writes_grad_field()) {
    throw Error(
        ErrorKind::kUnsupported,
        "FullyShardedDataParallel keeps gradients in .grad; run backward() instead of a distributed autograd "
        "context");
  }
  Pass& pass = pass_of(sink);
  record->entered = sink.end();
  for (const Open& open : pass.open) {
    if (open.stream) open.stream->pass_point(groups_.all());
  }
  record->unit->acquire();
  if (gradients.all) record->unit->add_nodes(gradients);
  std::unique_ptr<GradientStream> stream;
  if (record->synchronize)
    stream = std::make_unique<GradientStream>(*record->unit, /*alone=*/!record->contains_units);
  pass.open.push_back({record, gradients.all, std::move(stream)});
  pass.reduces = pass.reduces || record->synchronize;
  if (options_.prefetch && record->before) record->before->prefetch();
}

ShardedModel::Open& ShardedModel::open_of(const UnitGradients& node) {
  const RecordPtr& record = node.record;
  if (c10::GradMode::is_enabled()) throw create_graph_error(*record->unit);
  if (const auto running = running_.find(record->entered); running != running_.end()) {
    for (Open& open : running->second.open) {
      if (open.node.get() == &node) return open;
    }
  }
  throw_invalid(
      "backward reached {} not through a tensor that its forward returned, so its parameters were not "
      "gathered; return every tensor that the loss depends on",
      record->unit->describe());
}

bool ShardedModel::is_whole(const ForwardRecord& record) const {
  return passes_->current()->end() == record.entered;
}

void ShardedModel::gradient_ready(const UnitGradients& node, std::size_t trained, at::Tensor gradient) {
  const Open& open = open_of(node);
  if (open.stream && is_whole(*node.record)) return open.stream->add(trained, std::move(gradient));
  if (!gradient.defined()) return;
  for (const Unit::Part& part : node.record->unit->parts()) {
    if (!part.gradients) continue;
    const std::size_t count = part.parameters->entries().size();
    if (trained < count) return part.gradients->add(trained, gradient);
    trained -= count;
  }
}

/// An inner pass, of a segment of the unit that is computed again, is followed by others or by the end of this one.
void ShardedModel::unit_ready(const UnitGradients& node) {
  Open& open = open_of(node);
  const RecordPtr record = node.record;
  Unit& unit = *record->unit;
  const bool whole = is_whole(*record);
  const std::unique_ptr<GradientStream> stream = whole ? std::move(open.stream) : nullptr;
  if (whole) {
    std::erase_if(running_.at(record->entered).open,
                  [&](const Open& one) { return one.node.get() == &node; });
    unit.remove_nodes(node);
    unit.release();
  }
  if (stream) return stream->finish();
  for (const Unit::Part& part : unit.parts()) {
    if (part.gradients) part.gradients->set_has_sums(true);
  }
}

void ShardedModel::finish(const std::shared_ptr<engine::PassEnd>& end) {
  const auto running = running_.find(end);
  if (running == running_.end()) return;
  const Pass pass = std::exchange(running->second, {});
  for (const Open& open : pass.open) {  // the pass needed no gradient of a parameter
    if (open.stream) open.stream->abandon();
    if (open.node) open.record->unit->remove_nodes(*open.node);
    open.record->unit->release();
  }
  for (const auto& unit : units_) unit->free_if_idle();
  if (!pass.reduces) return groups_.await_readers();
  for (const auto& unit : units_) {
    const StepPartScope scope = unit->operations();
    for (const Unit::Part& part : unit->parts()) {
      if (part.gradients && part.gradients->has_sums()) part.gradients->reduce_all();
    }
  }
  reductions_->end_all();
  if (!commit()) groups_.await_readers();  // it waits for all ranks itself
}

/// Collective: a parameter gets its average if a rank has a gradient of it.
bool ShardedModel::commit() {
  std::vector<std::int32_t> used;
  for (const auto& unit : units_) {
    for (const Unit::Part& part : unit->parts()) {
      if (!part.gradients) continue;
      for (std::size_t i = 0; i < part.parameters->entries().size(); ++i)
        used.push_back(part.gradients->used(i) ? 1 : 0);
    }
  }
  if (used.empty()) return false;
  const at::Tensor all = at::empty({static_cast<std::int64_t>(used.size())}, at::kInt);
  std::copy(used.begin(), used.end(), all.data_ptr<std::int32_t>());
  groups_.all().all_reduce(all, collective::kMax).wait();
  const std::int32_t* next = all.data_ptr<std::int32_t>();
  for (const auto& unit : units_) {
    for (const Unit::Part& part : unit->parts()) {
      if (!part.gradients) continue;
      part.gradients->commit(next);
      next += part.parameters->entries().size();
    }
  }
  return true;
}

Error ShardedModel::with_unit_names(const Error& error) const {
  bool any = false;
  const auto named = [&](std::string text) {
    for (std::size_t unit = units_.size(); unit-- > 0;) {  // "#12" before "#1"
      const std::string number = describe_unit(static_cast<std::int32_t>(unit));
      for (auto at = text.find(number); at != std::string::npos; at = text.find(number, at)) {
        text.replace(at, number.size(), " of " + units_[unit]->describe());
        any = true;
      }
    }
    return text;
  };
  std::string message = named(error.message()), call = named(error.call());
  if (!any) return error;
  if (error.kind() == ErrorKind::kInvalid)
    message += "; all ranks must run the same units in the same order, also those whose inputs are empty";
  Error result(error.kind(), std::move(message));
  for (const RemoteFrame& frame : error.frames()) result.with_frame(frame);
  return result.with_worker(error.worker()).with_call(std::move(call)).with_elapsed(error.elapsed());
}

void ShardedModel::fail(const std::string& reason) noexcept {
  in_forward_ = false;
  forwards_.clear();
  try {
    const collective::Group& all = groups_.all();
    const int rank = all.ranks()[static_cast<std::size_t>(all.rank())];
    const Error cause(
        ErrorKind::kCancelled,
        fmt::format("rank {} failed, and a FullyShardedDataParallel cannot continue after that; "
                    "build the module again and restore a checkpoint: {}",
                    rank, reason));
    groups_.abort(cause);
    agreement_.abort(cause);
    reductions_->clear();
    for (const auto& unit : units_) unit->reset();
  } catch (...) {  // the caller reports the failure itself
  }
}

}  // namespace torchspan::sharded
