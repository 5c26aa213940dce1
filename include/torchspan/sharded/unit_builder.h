#pragma once
#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <torchspan/collective/group.h>
#include <torchspan/sharded/fully_sharded_options.h>
#include <torchspan/sharded/sharded_module.h>

namespace torchspan {
namespace sharded {

class ShardedModel;

}  // namespace sharded

/// Builds the units of a model one at a time and divides each at once, so that no rank ever allocates the whole
/// model. Pass it to the model's constructor, and then to FullyShardedDataParallel. Use it from one thread.
class UnitBuilder {
 public:
  /// Collective.
  explicit UnitBuilder(const collective::Group& group, sharded::FullyShardedOptions options = {});

  /// Collective: constructs `ts::Sharded<Holder>` and divides its parameters, of which it keeps this rank's part of rank
  /// 0's values. All ranks build the same units in the same order; an exception on one rank breaks the group. Later
  /// units must not share their parameters.
  template <class Holder, class... Arguments>
  Sharded<Holder> build(Arguments&&... arguments) {
    try {
      Sharded<Holder> unit(std::forward<Arguments>(arguments)...);
      divide(*unit);
      return unit;
    } catch (...) {
      failed();
      throw;
    }
  }

  const std::shared_ptr<sharded::ShardedModel>& model() const { return model_; }

 private:
  void divide(torch::nn::Module& unit);
  void failed() noexcept;

  const std::shared_ptr<sharded::ShardedModel> model_;
};

}  // namespace torchspan
