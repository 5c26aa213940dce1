#include <fmt/format.h>
#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded/fully_sharded_data_parallel.h>

#include "engine/api/gradient_use.h"
#include "sharded/state/entry_name.h"
#include "sharded/state/flat_ranges.h"
#include "sharded/state/gradient_norm.h"
#include "sharded/units/sharded_model.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {
namespace {

using Entry = FlatParameters::Entry;

template <class Visit>
void for_each_entry(const ShardedModel& model, const Visit& visit) {
  for (const auto& unit : model.units()) {
    for (const Unit::Part& part : unit->parts()) {
      for (const Entry& entry : part.parameters->entries()) visit(entry);
    }
  }
}

/// Throws if an optimizer would step the parameter in backward.
void check_gradient_use(const Entry& entry) {
  if (!engine::has_gradient_use(entry.tensor, engine::GradientUse::kSteps)) return;
  throw_invalid(
      fmt::format("parameter '{}' is stepped in backward by an optimizer, which finds no gradient of a "
                  "sharded parameter; destroy what step_in_backward() returned, and call step() after "
                  "backward",
                  entry.name));
}

class UnitsSource final : public checkpoint::StateSource {
 public:
  UnitsSource(std::shared_ptr<ShardedModel> model, const torch::nn::Module& module)
      : model_(std::move(model)) {
    for (const auto& item : module.named_buffers()) {
      if (item.value().defined() && seen_.insert(item.value().unsafeGetTensorImpl()).second)
        buffers_.emplace_back(item.key(), item.value());
    }
  }

  void save(checkpoint::StateWriter& writer) const override {
    if (!model_->groups().is_first_copy()) return;
    for_each_entry(*model_, [&](const Entry& entry) {
      if (entry.range.is_saved()) save_range(writer, entry.name, entry.part, entry.range);
    });
    for (const auto& [name, buffer] : buffers_) writer.add(name, buffer);
  }

  void load(const checkpoint::StateReader& reader) override {
    for_each_entry(*model_,
                   [&](const Entry& entry) { check_range(reader, entry.name, entry.part, entry.range); });
    for (const auto& [name, buffer] : buffers_) reader.check(name, buffer);
    const at::NoGradGuard no_grad;
    for_each_entry(*model_,
                   [&](const Entry& entry) { load_range(reader, entry.name, entry.part, entry.range); });
    for (const auto& [name, buffer] : buffers_) reader.read_into(name, buffer);
  }

 private:
  const std::shared_ptr<ShardedModel> model_;
  std::set<const c10::TensorImpl*> seen_;
  std::vector<std::pair<std::string, at::Tensor>> buffers_;
};

/// The state of a copy of the model that the ranks of another copy save.
class LoadedSource final : public checkpoint::StateSource {
 public:
  explicit LoadedSource(checkpoint::SourcePtr source) : source_(std::move(source)) {}
  void save(checkpoint::StateWriter&) const override {}
  void load(const checkpoint::StateReader& reader) override { source_->load(reader); }

 private:
  const checkpoint::SourcePtr source_;
};

}  // namespace

/// Keeps the module for its buffers; the model knows the parameters.
WrappedUnits::WrappedUnits(std::shared_ptr<torch::nn::Module> module, collective::Group group,
                           FullyShardedOptions options)
    : module_(std::move(module)), model_(std::make_shared<ShardedModel>(std::move(group), options)) {
  if (!module_) throw Error(ErrorKind::kInvalid, "the module is null");
  model_->divide(*module_);
}

WrappedUnits::WrappedUnits(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ShardedModel> model)
    : module_(std::move(module)), model_(std::move(model)) {
  if (!module_) throw Error(ErrorKind::kInvalid, "the module is null");
  if (!model_->units().empty()) {
    throw Error(
        ErrorKind::kInvalid,
        "the UnitBuilder has been given to a FullyShardedDataParallel already; make one for each model");
  }
  model_->divide(*module_);
}

WrappedUnits::~WrappedUnits() = default;

const std::shared_ptr<Unit>& WrappedUnits::begin_forward() {
  if (at::GradMode::is_enabled()) {
    for (const auto& unit : model_->units()) check_frozen(*unit);
    for_each_entry(*model_, check_gradient_use);
  }
  model_->begin_forward();
  return model_->root();
}

bool WrappedUnits::set_synchronize(bool synchronize) { return model_->set_synchronize(synchronize); }

void WrappedUnits::zero_grad() {
  for_each_entry(*model_, [](const Entry& entry) { entry.tensor.mutable_grad() = at::Tensor(); });
  for (const auto& unit : model_->units()) {
    for (const Unit::Part& part : unit->parts()) {
      if (part.gradients) part.gradients->drop();
    }
  }
}

double WrappedUnits::clip_grad_norm(double max_norm, double norm_type) {
  const ClipTerms terms(max_norm, norm_type);
  std::vector<at::Tensor> gradients;
  for_each_entry(*model_, [&](const Entry& entry) {
    if (entry.tensor.mutable_grad().defined()) gradients.push_back(entry.tensor.mutable_grad());
  });
  return clip_over_ranks(model_->groups().copy(), gradients, terms);
}

bool WrappedUnits::on_any_rank(bool finding) {
  const at::Tensor found = at::full({1}, finding ? 1 : 0, at::kInt);
  model_->groups().all().all_reduce(found, collective::kMax).wait();
  return found.item<int>() != 0;
}

void WrappedUnits::with_full_parameters(const std::function<void()>& body) {
  for (const auto& unit : model_->units()) unit->acquire_whole();
  const bool in_place = model_->groups().set_in_place(false);  // all parameters are copies now
  try {
    body();
  } catch (...) {
    model_->fail("the body of with_full_parameters() threw: " + describe(std::current_exception()).text);
    throw;
  }
  for (const auto& unit : model_->units()) unit->release_whole();
  model_->groups().set_in_place(in_place);
  model_->groups().await_readers();
}

checkpoint::SourcePtr WrappedUnits::module_source() {
  return std::make_unique<UnitsSource>(model_, *module_);
}

checkpoint::SourcePtr WrappedUnits::optimizer_source(optim::Optimizer& optimizer) {
  std::unordered_map<const c10::TensorImpl*, FlatRange> range_of;
  for_each_entry(*model_, [&](const Entry& entry) {
    range_of.emplace(entry.tensor.unsafeGetTensorImpl(), entry.range);
  });
  RangeByOwner ranges;
  for (const auto& [owner, parameter] : owned_parameters(optimizer)) {
    const auto found = range_of.find(parameter.unsafeGetTensorImpl());
    if (found == range_of.end()) {
      throw_invalid(fmt::format(
          "{} of the optimizer is not a parameter of this FullyShardedDataParallel: make the optimizer "
          "of the wrapped module's parameters, after wrapping it",
          optimizer.describe(parameter)));
    }
    ranges.emplace(owner, found->second);
  }
  auto source = ranged_optimizer_source(optimizer, std::move(ranges));
  if (model_->groups().is_first_copy()) return source;
  return std::make_unique<LoadedSource>(std::move(source));
}

FullyShardedStats WrappedUnits::stats() const {
  FullyShardedStats stats;
  for (const auto& unit : model_->units()) {
    stats.units.push_back(unit->name());
    stats.gathers += unit->gathers();
    for (const Unit::Part& part : unit->parts()) {
      stats.part_bytes += part.parameters->part().nbytes();
      if (part.parameters->joined() != nullptr) stats.mapped_bytes += part.parameters->joined()->bytes();
    }
  }
  stats.peak_bytes = model_->pool().peak_bytes();
  return stats;
}

}  // namespace torchspan::sharded
