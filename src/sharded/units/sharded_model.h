#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/sharded.h>

#include "engine/api/grad_field_sink.h"
#include "sharded/units/flat_parameters.h"
#include "sharded/units/gradient_shards.h"
#include "sharded/units/unit.h"

namespace torchspan::sharded {

/// The groups of a FullyShardedDataParallel: adjacent ranks divide a copy of the model, and the ranks that have the same
/// part of different copies average its gradients.
class ShardGroups {
 public:
  /// Collective: makes another group of the same ranks. One copy until split().
  explicit ShardGroups(const collective::Group& group);
  /// Why the ranks cannot be divided into parts of `shard_ranks`; empty: they can, or it is 0.
  std::string trouble(int shard_ranks) const;
  /// Collective: makes copies of `shard_ranks` ranks; 0: one copy.
  void split(int shard_ranks);

  const collective::Group& all() const { return all_; }
  /// This rank's copy.
  const collective::Group& copy() const { return copy_; }
  /// The ranks with the same part; nullopt: one copy.
  const std::optional<collective::Group>& replicas() const { return replicas_; }
  void abort(const Error& cause) const;

  /// Sets whether ranks of a copy read each other's parts in place; returns the previous value.
  bool set_in_place(bool in_place) { return std::exchange(in_place_, in_place); }
  /// If they do, collective: returns when no rank reads another one's part any more, so that parts may change.
  void await_readers() const;

 private:
  const collective::Group all_;
  collective::Group copy_;
  std::optional<collective::Group> replicas_;
  bool in_place_ = false;
};

/// Lets a backward pass begin on all ranks or on none, so that a rank that threw between forward and backward does not
/// leave the others in the middle of one. Has a group of its own: what a rank announces waits there until the others begin
/// a pass, and does not disturb their forwards. Forwards have the same numbers on all ranks.
class PassAgreement {
 public:
  /// Collective.
  explicit PassAgreement(const collective::Group& group) : group_(group.split(0, group.rank())) {}

  /// Collective: a pass over the outputs of forward `number` begins; nullopt, or why it must not begin on any rank:
  /// kRemoteFailure names a rank that runs no such pass. Throws failures of the group.
  std::optional<Error> begin_pass(std::int64_t number);
  /// This rank runs no pass over the outputs of forward `number` and those before. Returns at once.
  void announce_no_pass(std::int64_t number);
  /// Collective, also with ranks that begin a pass, which fails: whether `ok` on all ranks. If not, passes over
  /// outputs of forwards up to `number` must not begin.
  bool agree(bool ok, std::int64_t number);
  void abort(const Error& cause) const { group_.abort(cause); }

 private:
  enum class Kind : std::uint8_t { kNone, kPass, kNoPass, kAgrees, kDisagrees };
  struct Word {
    Kind kind;
    std::int64_t number;
  };
  Future<at::Tensor> send(Word mine) const;
  /// Returns the words of all ranks, by rank.
  std::vector<Word> exchange(Word mine) const;

  const collective::Group group_;
  std::int64_t skipped_ = -1;  ///< the newest forward that all ranks skip
};

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
