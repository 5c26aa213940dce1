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
    try {
      std::shared_ptr<Unit> before = model_->begin_unit(unit_);
      if (!c10::GradMode::is_enabled()) return;
      record_ = std::make_shared<ForwardRecord>(
          ForwardRecord{unit_, model_, std::move(before), model_->synchronizes(), nullptr});
      gradients_ = make_gradients_node(record_);
      if (gradients_) unit_->add_node(gradients_);
    } catch (...) {
      failed();
      throw;
    }
  }

  std::vector<at::Tensor> finish(std::vector<at::Tensor> outputs) {
    if (record_) outputs = mark_unit_outputs(std::move(outputs), record_, gradients_);
    if (gradients_) unit_->remove_node(*gradients_);
    unit_->release(/*keep=*/record_ != nullptr && !model_->options().reshard_after_forward);
    if (unit_ == model_->root()) model_->end_forward();
    return outputs;
  }

  void failed() noexcept {
    model_->fail(fmt::format("the forward of {} threw: {}", unit_->describe(),
                             describe(std::current_exception()).text));
  }

 private:
  const std::shared_ptr<Unit> unit_;
  const std::shared_ptr<ShardedModel> model_;
  RecordPtr record_;
  engine::NodePtr gradients_;
};

UnitForward::UnitForward(std::shared_ptr<Unit> unit) : impl_(std::make_unique<Impl>(std::move(unit))) {}
UnitForward::~UnitForward() = default;
std::vector<at::Tensor> UnitForward::finish(std::vector<at::Tensor> outputs) {
  return impl_->finish(std::move(outputs));
}
void UnitForward::failed() noexcept { impl_->failed(); }

void refuse_clone(const UnitModule& module) {
  if (!module.unit) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("{} cannot be cloned: its parameters are divided among ranks; build a new module and load "
                  "the state",
                  module.unit->describe()));
}

}  // namespace torchspan::sharded
