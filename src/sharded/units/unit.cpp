#include "sharded/units/unit.h"

#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/sharded/unit_forward.h>

#include "core/api/throw_invalid.h"
#include "sharded/parts.h"
#include "sharded/units/sharded_model.h"

namespace torchspan::sharded {

std::string Unit::describe() const {
  return name_.empty() ? "the root unit" : fmt::format("unit '{}'", name_);
}

bool Unit::name_parameter(const at::Tensor& parameter, const std::string& name) {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.parameters->set_name(parameter, name); });
}

void Unit::set_place(std::string name, std::size_t number) {
  name_ = std::move(name);
  number_ = static_cast<std::int32_t>(number);
}

StepPartScope Unit::operations() const {
  StepPart part = StepPartScope::current();
  part.unit = number_;
  return StepPartScope(part);
}

std::shared_ptr<ShardedModel> Unit::model() const {
  if (auto model = model_.lock()) return model;
  throw_invalid(
      "the FullyShardedDataParallel of {} was destroyed, and its parameters are divided; keep the wrapper as "
      "long as the module is used",
      describe());
}

bool Unit::is_gathered() const {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.parameters->is_gathered(); });
}

bool Unit::holds(const at::Tensor& tensor) const {
  return std::any_of(parts_.begin(), parts_.end(),
                     [&](const Part& part) { return part.parameters->holds(tensor); });
}

void Unit::prefetch() {
  const StepPartScope scope = operations();
  for (const Part& part : parts_) part.parameters->begin_gather();
}

void Unit::acquire() {
  if (!is_gathered()) ++gathers_;
  prefetch();
  for (const Part& part : parts_) part.parameters->end_gather();
  ++users_;
}

void Unit::acquire_whole() {
  if (!is_gathered()) ++gathers_;
  const StepPartScope scope = operations();
  for (const Part& part : parts_) part.parameters->begin_whole();
  ++users_;
}

void Unit::release_whole() {
  for (const Part& part : parts_) part.parameters->end_whole();
  release();
}

void Unit::release(bool keep) {
  if (users_ > 0) --users_;
  if (!keep) free_if_idle();
}

void Unit::free_if_idle() {
  if (users_ > 0) return;
  for (const Part& part : parts_) part.parameters->free();
}

void Unit::drop_prefetch() {
  if (users_ > 0) return;
  for (const Part& part : parts_) {
    if (part.parameters->is_gathering()) part.parameters->free();
  }
}

std::vector<at::Tensor> Unit::trained() const {
  std::vector<at::Tensor> tensors;
  for (const Part& part : parts_) {
    if (!part.gradients) continue;
    for (const FlatParameters::Entry& entry : part.parameters->entries()) tensors.push_back(entry.tensor);
  }
  return tensors;
}

void Unit::add_nodes(GradientNodes nodes) {
  nodes_.push_back(std::move(nodes));
  set_edges();
}

void Unit::remove_nodes(const torch::autograd::Node& all) {
  std::erase_if(nodes_, [&](const GradientNodes& one) { return one.all.get() == &all; });
  set_edges();
}

/// An operation of an older node's forward needs the parameters to have any node when its backward runs.
void Unit::set_edges() const {
  std::size_t index = 0;
  for (const at::Tensor& tensor : trained()) {
    torch::autograd::Edge edge;
    for (const GradientNodes& nodes : nodes_) {
      if (const engine::NodePtr& node = nodes.parameters[index]) edge = torch::autograd::Edge(node, 0);
    }
    ++index;
    torch::autograd::impl::set_gradient_edge(tensor, std::move(edge));
  }
}

void Unit::reset() {
  users_ = 0;
  nodes_.clear();
  set_edges();
  for (const Part& part : parts_) {
    if (part.gradients) part.gradients->drop();
    try {
      part.parameters->free();
    } catch (const Error&) {  // the group is broken
    }
  }
}

void check_frozen(Unit& unit) {
  for (const Unit::Part& part : unit.parts()) {
    if (part.gradients) continue;
    for (const FlatParameters::Entry& entry : part.parameters->entries()) {
      if (!entry.tensor.requires_grad()) continue;
      throw_invalid(
          "parameter '{}' required no gradient when FullyShardedDataParallel divided it, and requires one "
          "now, which would not be averaged; set requires_grad before the module is wrapped, and freeze it "
          "afterwards",
          entry.name);
    }
  }
}

namespace {

/// Calls the model; a failure reaches the other ranks with its reason.
template <class Call>
void call_model(ShardedModel& model, const Call& call) {
  try {
    call(model);
  } catch (const Error& error) {
    const Error named = model.with_unit_names(error);
    model.fail("its backward pass failed: " + std::string(named.what()));
    throw named;
  } catch (...) {
    model.fail("its backward pass failed: " + describe(std::current_exception()).text);
    throw;
  }
}

struct UnitOutputs final : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    gradients.resize(num_outputs());
    return std::move(gradients);
  }
  std::string name() const override { return "ShardedUnitOutputs"; }
};

class UnitOutputsHook final : public engine::PassHook {
 public:
  UnitOutputsHook(RecordPtr record, GradientNodes gradients)
      : PassHook(record->model->passes()), record_(std::move(record)), gradients_(std::move(gradients)) {}
  ~UnitOutputsHook() override {
    // A pipeline that fails discards the graphs of its micro-batches when the exception has been caught.
    const bool in_layer = record_->part.kind != StepPart::Kind::kNone;
    if (in_layer || std::uncaught_exceptions() > exceptions_) record_->model->outputs_dropped(*record_);
  }
  UnitOutputsHook(const UnitOutputsHook&) = delete;
  UnitOutputsHook& operator=(const UnitOutputsHook&) = delete;
  void pass_arrives(engine::GradientSink& sink) override {
    std::optional<Error> refusal;
    call_model(*record_->model, [&](ShardedModel& model) {
      refusal = model.begin_pass(sink, *record_);
      if (!refusal) model.enter_backward(sink, record_, gradients_);
    });
    if (refusal) throw Error(*refusal);
  }

 private:
  const RecordPtr record_;
  const GradientNodes gradients_;                      // the graph owns them anyway
  const int exceptions_ = std::uncaught_exceptions();  // that propagated in the forward
};

/// Whether the program wants a gradient. tensor.requires_grad() is true for any tensor with a gradient edge.
bool is_trained_now(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->requires_grad_;
}

}  // namespace

torch::autograd::variable_list UnitGradients::apply(torch::autograd::variable_list&&) {
  call_model(*record->model, [&](ShardedModel& model) { model.unit_ready(*this); });
  return {};
}

/// The largest sequence number, as AccumulateGrad: runs before other nodes that are ready.
ParameterGradient::ParameterGradient(std::size_t trained, engine::NodePtrTo<UnitGradients> all)
    : Node(std::numeric_limits<std::uint64_t>::max()), trained(trained), all(std::move(all)) {}

torch::autograd::variable_list ParameterGradient::apply(torch::autograd::variable_list&& gradients) {
  call_model(*all->record->model,
             [&](ShardedModel& model) { model.gradient_ready(*all, trained, std::move(gradients[0])); });
  return {at::Tensor()};
}

GradientNodes make_gradient_nodes(const RecordPtr& record) {
  const std::vector<at::Tensor> trained = record->unit->trained();
  const auto all = engine::make_node<UnitGradients>(record);
  GradientNodes nodes{all, {}};
  for (std::size_t i = 0; i < trained.size(); ++i) {
    if (!is_trained_now(trained[i])) {
      nodes.parameters.emplace_back();
      continue;
    }
    auto node = engine::make_node<ParameterGradient>(i, all);
    node->add_input_metadata(trained[i]);
    node->add_next_edge(torch::autograd::Edge(all, all->add_input_metadata(trained[i])));
    nodes.parameters.push_back(std::move(node));
  }
  return nodes;
}

std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const GradientNodes& gradients) {
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad()) continue;
    auto node = engine::make_node<UnitOutputs>();
    node->add_pre_hook(std::make_unique<UnitOutputsHook>(record, gradients));
    node->add_next_edge(torch::autograd::impl::gradient_edge(output));
    // A pass that uses none of the parameters on this rank, but on others, reaches the node, too.
    if (gradients.all)
      node->add_next_edge(torch::autograd::Edge(gradients.all, gradients.all->add_input_metadata(output)));
    at::Tensor stand_in = output.detach();
    torch::autograd::create_gradient_edge(stand_in, node);
    output = std::move(stand_in);
  }
  return outputs;
}

class UnitForward::Impl {
 public:
  explicit Impl(std::shared_ptr<Unit> unit) : unit_(std::move(unit)), model_(unit_->model()) {
    if (c10::GradMode::is_enabled()) check_frozen(*unit_);
    model_->check_wrapped(*unit_);
    try {
      std::shared_ptr<Unit> before = model_->begin_unit(unit_);
      if (c10::GradMode::is_enabled()) {
        record_ = std::make_shared<ForwardRecord>();
        record_->unit = unit_;
        record_->model = model_;
        record_->before = std::move(before);
        record_->part = StepPartScope::current();
        record_->number = model_->number();
        record_->synchronize = model_->synchronizes();
        gradients_ = make_gradient_nodes(record_);
        if (gradients_.all) unit_->add_nodes(gradients_);
      }
      model_->enter_forward(record_);
    } catch (const Error& error) {
      const Error named = model_->with_unit_names(error);
      failed(named.what());
      throw named;
    } catch (...) {
      failed(describe(std::current_exception()).text);
      throw;
    }
  }

  std::vector<at::Tensor> finish(std::vector<at::Tensor> outputs) {
    for (at::Tensor& output : outputs) {  // a parameter's memory is freed after the forward
      if (unit_->holds(output)) output = output.clone();
    }
    const auto dtype = model_->options().precision.output_dtype;
    if (dtype && model_->is_root(unit_)) {
      for (at::Tensor& output : outputs) {
        if (output.defined() && output.is_floating_point()) output = output.to(*dtype);
      }
    }
    if (record_) outputs = mark_unit_outputs(std::move(outputs), record_, gradients_);
    if (gradients_.all) unit_->remove_nodes(*gradients_.all);
    unit_->release(/*keep=*/record_ != nullptr && !model_->options().reshard_after_forward);
    model_->leave_forward();
    return outputs;
  }

  void failed(const std::string& text) noexcept {
    model_->fail(fmt::format("the forward of {} threw: {}", unit_->describe(), text));
  }

 private:
  const std::shared_ptr<Unit> unit_;
  const std::shared_ptr<ShardedModel> model_;
  RecordPtr record_;
  GradientNodes gradients_;
};

UnitForward::UnitForward(std::shared_ptr<Unit> unit) : impl_(std::make_unique<Impl>(std::move(unit))) {}
UnitForward::~UnitForward() = default;
std::vector<at::Tensor> UnitForward::finish(std::vector<at::Tensor> outputs) {
  return impl_->finish(std::move(outputs));
}
void UnitForward::failed() noexcept { impl_->failed(describe(std::current_exception()).text); }

std::optional<at::ScalarType> input_dtype(const std::shared_ptr<Unit>& unit) {
  const MixedPrecision& precision = unit->model()->options().precision;
  return precision.cast_forward_inputs ? precision.param_dtype : std::nullopt;
}

void refuse_clone(const UnitModule& module) {
  if (!module.unit) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("{} cannot be cloned: its parameters are divided among ranks; build a new module and load "
                  "the state",
                  module.unit->describe()));
}

namespace {

/// Walks a module; finds the unit of each parameter.
class Walk {
 public:
  Walk(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built) : built_(built) {
    units_.emplace_back();
    visit(module, "", 0);
  }
  std::size_t unit_of(const at::Tensor& tensor) const { return unit_of_.at(tensor.unsafeGetTensorImpl()); }
  std::vector<ListedUnit> take() { return std::move(units_); }

 private:
  void visit(torch::nn::Module& module, const std::string& name, std::size_t unit) {
    if (auto* found = dynamic_cast<UnitModule*>(&module)) {
      const auto [place, is_new] = index_of_.emplace(found, units_.size());
      unit = place->second;
      if (is_new) {
        const bool is_built = std::find(built_.begin(), built_.end(), found->unit) != built_.end();
        if (found->unit && !is_built) {
          throw_invalid("unit '{}' is divided by a FullyShardedDataParallel already; wrap it once", name);
        }
        units_.push_back({name, found, found->unit, {}});
      }
    }
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined()) continue;
      const auto [place, is_new] = unit_of_.emplace(item.value().unsafeGetTensorImpl(), unit);
      if (!is_new && place->second != unit)
        place->second = 0;  // shared between units: in the root, always gathered
    }
    for (const auto& child : module.named_children())
      visit(*child.value(), name.empty() ? child.key() : name + "." + child.key(), unit);
  }

  const std::vector<std::shared_ptr<Unit>>& built_;
  std::vector<ListedUnit> units_;
  std::map<UnitModule*, std::size_t> index_of_;
  std::map<const c10::TensorImpl*, std::size_t> unit_of_;
};

/// Names a parameter of a divided unit; returns whether the unit is one and has it.
bool name_built(const ListedUnit& unit, const std::string& name, const at::Tensor& tensor) {
  return unit.divided && unit.divided->name_parameter(tensor, name);
}

/// Dividing parameters would end that they share memory.
void check_memory(const torch::nn::Module& module) {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined() || !seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    names.push_back(item.key());
    tensors.push_back(item.value());
  }
  if (const auto shared = overlapping(tensors)) {
    throw Error(
        ErrorKind::kUnsupported,
        fmt::format("parameters '{}' and '{}' share memory, which would end: register one tensor in both "
                    "modules",
                    names[shared->first], names[shared->second]));
  }
}

}  // namespace

std::vector<ListedUnit> units_of(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built) {
  Walk walk(module, built);
  std::vector<ListedUnit> units = walk.take();
  std::vector<std::map<std::pair<at::ScalarType, bool>, std::vector<NamedParameter>>> parts;
  std::map<const c10::TensorImpl*, bool> seen;
  at::Tensor first;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.emplace(tensor.unsafeGetTensorImpl(), true).second) continue;
    if (!first.defined()) first = tensor;
    if (tensor.layout() != at::kStrided || tensor.device() != first.device()) {
      throw Error(
          ErrorKind::kUnsupported,
          fmt::format(
              "parameter '{}' is on {} and the first one on {}; all must be dense and on one device: call "
              "module->to(device) before the module is sharded",
              item.key(), tensor.device().str(), first.device().str()));
    }
    const std::size_t unit = walk.unit_of(tensor);
    if (name_built(units[unit], item.key(), tensor)) continue;
    for (const auto& other : built) {
      if (!other->name_parameter(tensor, item.key())) continue;
      throw_invalid(
          "parameter '{}' is used by several units, but the UnitBuilder has divided it; build those units "
          "without it",
          item.key());
    }
    if (parts.size() <= unit) parts.resize(unit + 1);
    parts[unit][{tensor.scalar_type(), tensor.requires_grad()}].push_back({item.key(), tensor});
  }
  check_memory(module);
  for (std::size_t unit = 0; unit < parts.size(); ++unit) {
    for (auto& [kind, parameters] : parts[unit]) units[unit].parts.push_back(std::move(parameters));
  }
  return units;
}

void check_built(const std::vector<ListedUnit>& units, const std::vector<std::shared_ptr<Unit>>& built) {
  for (std::size_t i = 0; i < built.size(); ++i) {
    const auto is_it = [&](const ListedUnit& unit) { return unit.divided == built[i]; };
    if (std::any_of(units.begin(), units.end(), is_it)) continue;
    throw_invalid(
        "the module does not contain unit {} of {} that the UnitBuilder has built; register each of them "
        "with register_module()",
        i + 1, built.size());
  }
}

}  // namespace torchspan::sharded
