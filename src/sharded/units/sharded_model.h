#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective/group.h>
#include <torchspan/core/error.h>
#include <torchspan/sharded/fully_sharded_data_parallel.h>

#include "engine/api/grad_field_sink.h"
#include "sharded/units/buffer_pool.h"
#include "sharded/units/gradient_stream.h"
#include "sharded/units/pass_agreement.h"
#include "sharded/units/reduction_queue.h"
#include "sharded/units/shard_groups.h"
#include "sharded/units/unit.h"
#include "sharded/units/unit_list.h"
#include "sharded/units/unit_nodes.h"

namespace torchspan::sharded {

/// The units of one module: runs their forwards and follows backward passes. Use it on the training thread, or on the
/// thread that runs backward.
class ShardedModel final : public std::enable_shared_from_this<ShardedModel> {
 public:
  ShardedModel(const collective::Group& group, FullyShardedOptions options);
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  /// Collective, once: divides the parameters of the module that divide_unit() has not divided.
  void divide(torch::nn::Module& module);
  /// Collective: divides the parameters of a unit and of those in it, before divide() of a module that contains it.
  void divide_unit(torch::nn::Module& unit);

  /// A forward of the whole module begins.
  void begin_forward();
  /// Throws Error{kInvalid} if the unit runs although neither a forward nor a backward of the whole module does.
  void check_wrapped(const Unit& unit) const;
  /// The unit begins a forward: gathers it and prefetches the next one. Returns the unit before it.
  std::shared_ptr<Unit> begin_unit(const std::shared_ptr<Unit>& unit);
  /// A unit's forward runs between these; a null record if no backward follows.
  void enter_forward(const RecordPtr& record) { forwards_.push_back(record); }
  void leave_forward();
  /// A backward pass comes through an output of a forward; the first such call of a pass is collective. Returns why the
  /// pass must not begin; the model can continue then.
  std::optional<Error> begin_pass(const engine::GradientSink& sink, ForwardRecord& record);
  /// An exception discarded outputs of the forward.
  void outputs_dropped(ForwardRecord& record) noexcept;
  bool agree(bool ok);
  /// A backward pass comes through an output of the forward.
  void enter_backward(engine::GradientSink& sink, const RecordPtr& record, const GradientNodes& gradients);
  /// The gradient of a trained parameter of the node's unit.
  void gradient_ready(const UnitGradients& node, std::size_t trained, at::Tensor gradient);
  /// No more gradients come to the node's unit in this pass.
  void unit_ready(const UnitGradients& node);
  /// The error of an operation, with the names of the units for their numbers, and what to do if ranks run different ones.
  Error with_unit_names(const Error& error) const;
  /// Breaks the group with a failure of this rank.
  void fail(const std::string& reason) noexcept;

  ShardGroups& groups() { return groups_; }
  const FullyShardedOptions& options() const { return options_; }
  const std::shared_ptr<engine::NativeEnginePasses>& passes() const { return passes_; }
  const std::vector<std::shared_ptr<Unit>>& units() const { return units_; }
  const std::shared_ptr<Unit>& root() const { return units_[0]; }
  bool is_root(const std::shared_ptr<Unit>& unit) const { return !units_.empty() && units_[0] == unit; }
  BufferPool& pool() const { return *pool_; }
  std::int64_t number() const { return number_; }
  bool synchronizes() const { return pauses_ == 0; }
  void pause_reductions() { ++pauses_; }
  void resume_reductions() { --pauses_; }

 private:
  /// What one backward pass has come to.
  struct Open {
    RecordPtr record;
    engine::NodePtr node;
    std::unique_ptr<GradientStream> stream;  ///< null: gradients are not reduced
  };
  struct Pass {
    std::vector<Open> open;  ///< forwards whose gradients are not complete
    bool reduces = false;
  };
  /// Lists the units of a module, and makes the groups if it is the first; throws on all ranks if one fails.
  std::vector<ListedUnit> listed_by_all(torch::nn::Module& module, bool complete);
  std::shared_ptr<Unit> divided(const ListedUnit& unit);
  Pass& pass_of(engine::GradientSink& sink);
  Open& open_of(const UnitGradients& node);
  /// Whether LibTorch runs the pass that came to the unit, not an inner one that computes a part of it again.
  bool is_whole(const ForwardRecord& record) const;
  void finish(const std::shared_ptr<engine::PassEnd>& end);
  /// Collective; returns whether it sent anything.
  bool commit();

  ShardGroups groups_;
  PassAgreement agreement_;
  const FullyShardedOptions options_;
  const std::shared_ptr<BufferPool> pool_;
  const std::shared_ptr<ReductionQueue> reductions_;
  const std::shared_ptr<engine::NativeEnginePasses> passes_;
  std::vector<std::shared_ptr<Unit>> built_;                ///< by divide_unit()
  std::vector<std::shared_ptr<Unit>> units_;                ///< the root first
  std::set<std::int64_t> lengths_;                          ///< of shared segments, which all differ
  std::vector<std::shared_ptr<Unit>> sequence_, previous_;  ///< units of this forward and of the last one
  std::map<std::shared_ptr<engine::PassEnd>, Pass> running_;
  std::int64_t number_ = 0;          ///< of the last forward of the whole module
  std::vector<RecordPtr> forwards_;  ///< that run now, the outermost first
  bool in_forward_ = false;
  std::size_t pauses_ = 0;  ///< of reductions
};

}  // namespace torchspan::sharded
