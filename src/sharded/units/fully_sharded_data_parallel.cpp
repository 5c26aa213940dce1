#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded.h>

#include "core/api/throw_invalid.h"
#include "engine/api/grad_field_sink.h"
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
      "parameter '{}' is stepped in backward by an optimizer, which finds no gradient of a sharded "
      "parameter; destroy what step_in_backward() returned, and call step() after backward",
      entry.name);
}

}  // namespace

/// Keeps the module for its buffers; the model knows the parameters.
WrappedUnits::WrappedUnits(std::shared_ptr<torch::nn::Module> module, collective::Group group,
                           FullyShardedOptions options)
    : module_(std::move(module)), model_(make_process_shared<ShardedModel>(std::move(group), options)) {
  if (!module_) throw_invalid("the module is null");
  model_->divide(*module_);
}

WrappedUnits::WrappedUnits(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<ShardedModel> model)
    : module_(std::move(module)), model_(std::move(model)) {
  if (!module_) throw_invalid("the module is null");
  if (!model_->units().empty()) {
    throw_invalid(
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

void WrappedUnits::pause_reductions() { model_->pause_reductions(); }
void WrappedUnits::resume_reductions() { model_->resume_reductions(); }

bool WrappedUnits::agree(bool ok) { return model_->agree(ok); }

void WrappedUnits::zero_grad() {
  for_each_entry(*model_, [](const Entry& entry) { entry.tensor.mutable_grad() = at::Tensor(); });
  for (const auto& unit : model_->units()) {
    for (const Unit::Part& part : unit->parts()) {
      if (part.gradients) part.gradients->drop();
    }
  }
}

double WrappedUnits::clip_grad_norm(double max_norm, double norm_type) {
  std::vector<at::Tensor> parameters;
  for_each_entry(*model_, [&](const Entry& entry) { parameters.push_back(entry.tensor); });
  return optim::clip_grad_norm(parameters, max_norm, norm_type);
}

bool WrappedUnits::on_any_rank(bool finding) {
  const at::Tensor found = at::full({1}, finding ? 1 : 0, at::kInt);
  model_->groups().all().all_reduce(found, collective::kMax).wait();
  return found.item<int>() != 0;
}

void WrappedUnits::with_full_parameters(const std::function<void()>& body) {
  try {
    for (const auto& unit : model_->units()) unit->acquire_whole();
  } catch (const Error& error) {  // the other ranks wait for this one's parts
    const Error named = model_->with_unit_names(error);
    model_->fail(named.what());
    throw named;
  } catch (...) {
    model_->fail("the parameters could not be gathered: " + describe(std::current_exception()).text);
    throw;
  }
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

state::SourcePtr WrappedUnits::module_source() { return state::module_source(module_); }

state::SourcePtr WrappedUnits::optimizer_source(optim::Optimizer& optimizer) {
  std::set<const c10::TensorImpl*> known;
  for_each_entry(*model_, [&](const Entry& entry) { known.insert(entry.tensor.unsafeGetTensorImpl()); });
  for (const at::Tensor& parameter : optimizer.parameters()) {
    if (known.contains(parameter.unsafeGetTensorImpl())) continue;
    throw_invalid(
        "{} of the optimizer is not a parameter of this FullyShardedDataParallel: make the optimizer of the "
        "wrapped module's parameters, after wrapping it",
        optimizer.describe(parameter));
  }
  return optimizer.state_source();
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

namespace torchspan {

UnitBuilder::UnitBuilder(const collective::Group& group, sharded::FullyShardedOptions options)
    : model_(std::make_shared<sharded::ShardedModel>(group, options)) {}

void UnitBuilder::divide(torch::nn::Module& unit) { model_->divide_unit(unit); }

void UnitBuilder::failed() noexcept {
  model_->fail("a unit could not be built: " + describe(std::current_exception()).text);
}

}  // namespace torchspan
