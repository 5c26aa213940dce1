#include <ATen/core/ivalue.h>

#include <torchspan/core/error.h>
#include <torchspan/sharded/unit_builder.h>

#include "sharded/units/sharded_model.h"

namespace torchspan {

UnitBuilder::UnitBuilder(const collective::Group& group, sharded::FullyShardedOptions options)
    : model_(std::make_shared<sharded::ShardedModel>(group, options)) {}

void UnitBuilder::divide(torch::nn::Module& unit) { model_->divide_unit(unit); }

void UnitBuilder::failed() noexcept {
  model_->fail("a unit could not be built: " + describe(std::current_exception()).text);
}

}  // namespace torchspan
