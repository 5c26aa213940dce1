#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <torchspan/detail/engine/gradient_sink.h>
#include <torchspan/detail/sharded/unit_forward.h>

#include "core/api/step_part.h"
#include "engine/api/grad_field_sink.h"
#include "engine/api/node_ptr.h"
#include "sharded/units/flat_parameters.h"
#include "sharded/units/gradient_shards.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace torchspan::sharded {

class ShardedModel;

/// The nodes of one forward that receive the gradients of a unit's trained parameters.
struct GradientNodes {
  engine::NodePtr all;  ///< runs when all gradients of a pass have arrived; null: no backward follows
  /// One for each trained parameter, followed by `all`; null for one that is frozen during this forward.
  std::vector<engine::NodePtr> parameters;
};

/// Parameters that are gathered and freed together. Counts its users; use it on the training thread, or on the thread
/// that runs backward.
class Unit {
 public:
  struct Part {
    std::unique_ptr<FlatParameters> parameters;
    std::unique_ptr<GradientShards> gradients;  ///< null if the parameters are frozen
  };

  Unit(std::string name, std::vector<Part> parts, std::weak_ptr<ShardedModel> model)
      : name_(std::move(name)), parts_(std::move(parts)), model_(std::move(model)) {}
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const std::string& name() const { return name_; }
  /// Its place in the model: the name, and the number that operations of the unit have.
  void set_place(std::string name, std::size_t number);
  /// Sets the name of a parameter; returns whether the unit has it.
  bool name_parameter(const at::Tensor& parameter, const std::string& name);
  /// "unit 'blocks.3'" or "the root unit".
  std::string describe() const;
  /// Operations that begin while the result lives belong to the unit: they fail if other ranks run another one.
  [[nodiscard]] StepPartScope operations() const;
  std::vector<Part>& parts() { return parts_; }
  /// Throws Error{kInvalid} if the FullyShardedDataParallel was destroyed.
  std::shared_ptr<ShardedModel> model() const;

  /// Issues a gather unless the parameters are whole.
  void prefetch();
  /// Collective: returns when the parameters are whole.
  void acquire();
  /// Collective: as acquire() and release(), but the parameters have their own dtype, and changes of them are kept.
  void acquire_whole();
  void release_whole();
  /// Ends what one acquire() began; the last one frees the parameters unless `keep`.
  void release(bool keep = false);
  /// Frees the parameters unless they are in use.
  void free_if_idle();
  /// Ends a gather that prefetch() began and no user followed: the parameters may change now.
  void drop_prefetch();
  bool is_gathered() const;
  /// Whether a user has it: a forward, a backward or with_full_parameters().
  bool in_use() const { return users_ > 0; }
  /// Whether `tensor` is a gathered parameter or a view of one.
  bool holds(const at::Tensor& tensor) const;
  /// Number of gathers so far.
  std::uint64_t gathers() const { return gathers_; }

  /// Gradients of the parameters go to `nodes` until remove_nodes(nodes.all).
  void add_nodes(GradientNodes nodes);
  void remove_nodes(const torch::autograd::Node& all);
  std::vector<at::Tensor> trained() const;
  /// After a failure: no users, no nodes, no unfinished gradients.
  void reset();

 private:
  void set_edges() const;

  std::string name_;
  std::int32_t number_ = -1;
  std::vector<Part> parts_;
  const std::weak_ptr<ShardedModel> model_;
  std::size_t users_ = 0;
  std::uint64_t gathers_ = 0;
  std::vector<GradientNodes> nodes_;
};

/// Throws Error{kInvalid} that names a parameter of the unit that was frozen when it was divided, and is trained now.
void check_frozen(Unit& unit);

/// One forward of a unit that a backward pass may follow. Nodes of the graph own it.
struct ForwardRecord {
  std::shared_ptr<Unit> unit;
  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<Unit> before;  ///< ran before it in the forward of the whole module; null: unknown
  bool synchronize = true;
  StepPart part;                             ///< in which the forward ran
  std::int64_t number = 0;                   ///< of the forward of the whole module
  bool has_no_pass = false;                  ///< the other ranks know that no pass follows
  bool contains_units = false;               ///< other units ran inside this forward
  std::shared_ptr<engine::PassEnd> entered;  ///< of the last pass that came through its outputs
};
using RecordPtr = std::shared_ptr<ForwardRecord>;

/// Runs when a pass has found the gradients of all trained parameters that one forward of a unit used.
struct UnitGradients final : torch::autograd::Node {
  explicit UnitGradients(RecordPtr record) : record(std::move(record)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override;
  std::string name() const override { return "ShardedUnitGradients"; }

  const RecordPtr record;
};

/// Receives the whole gradient of one parameter from one forward, as soon as it is known.
struct ParameterGradient final : torch::autograd::Node {
  ParameterGradient(std::size_t trained, engine::NodePtrTo<UnitGradients> all);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;
  std::string name() const override { return "ShardedParameterGradient"; }

  const std::size_t trained;  ///< index among the unit's trained parameters
  const engine::NodePtrTo<UnitGradients> all;
};

/// Nodes for the unit's trained parameters, which are gathered.
GradientNodes make_gradient_nodes(const RecordPtr& record);

/// Returns stand-ins for the tensors. A pass that goes through one of them first calls the model.
std::vector<at::Tensor> mark_unit_outputs(std::vector<at::Tensor> outputs, const RecordPtr& record,
                                          const GradientNodes& gradients);

/// One unit of a module, before it is divided.
struct ListedUnit {
  std::string name;                                ///< empty: the root
  UnitModule* module = nullptr;                    ///< null: the root
  std::shared_ptr<Unit> divided;                   ///< by a UnitBuilder; null: not yet
  std::vector<std::vector<NamedParameter>> parts;  ///< by dtype and whether they are trained; none are empty
};

/// The units of a module, the root first, each parameter once under its first name. Those in `built` are divided
/// already, and their parameters get their names here. Throws Error{kInvalid} for a unit that is divided otherwise, and
/// for a built one that shares a parameter; Error{kUnsupported} for a parameter that is not on one device with others.
std::vector<ListedUnit> units_of(torch::nn::Module& module, const std::vector<std::shared_ptr<Unit>>& built);
/// Throws Error{kInvalid} if one of `built` is not among the units.
void check_built(const std::vector<ListedUnit>& units, const std::vector<std::shared_ptr<Unit>>& built);

}  // namespace torchspan::sharded
