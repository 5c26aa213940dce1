#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/sharded/unit_forward.h>

#include "sharded/units/sharded_model.h"
#include "sharded/units/unit.h"
#include "sharded/units/unit_nodes.h"

namespace torchspan::sharded {

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

}  // namespace torchspan::sharded
