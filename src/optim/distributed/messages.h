#pragma once
#include <string>
#include <vector>

#include <torchspan/detail/rpc/message.h>
#include <torchspan/detail/rpc/reference_wire.h>
#include <torchspan/detail/rpc/worker_backend.h>
#include <torchspan/optim/functional.h>
#include <torchspan/optim/optimizer.h>
#include <torchspan/rpc/rref.h>

namespace torchspan::optim {

/// A module or tensor to train, and the prefix of its parameters' names.
struct OptimizerTarget {
  rpc::ReferencePtr value;
  std::string name;
};

struct OptimizerGroup {
  std::string label;
  OptimizerSpec spec;
  std::vector<OptimizerTarget> targets;
  bool hogwild = false;
};

/// Creates an optimizer over the parameters that the references name, which the receiver owns.
struct CreateOptimizer {
  static constexpr wire::MessageType kType{0x0201};
  static constexpr std::string_view kName = "optim.create";
  using Reply = Unit;
  GlobalId id;
  std::vector<OptimizerGroup> groups;
};

/// Steps an optimizer with the receiver's gradients of the context.
struct StepOptimizer {
  static constexpr wire::MessageType kType{0x0202};
  static constexpr std::string_view kName = "optim.step";
  using Reply = bool;  ///< whether a pass has begun in the context, as far as the receiver knows
  GlobalId id;
  std::uint64_t context = 0;
  std::vector<double> rates;  ///< learning rates by group; NaN keeps a group's rate
  double scale = 1;           ///< factor of the gradients
};

struct DropOptimizer {
  static constexpr wire::MessageType kType{0x0203};
  static constexpr std::string_view kName = "optim.drop";
  using Reply = Unit;
  GlobalId id;
};

/// An owner's part in clipping gradients.
struct GradientNorm {
  double norm = 0;
  std::string averaged;  ///< a parameter whose gradient a reducer averages; empty: none
  std::string own;       ///< a parameter whose gradient no reducer averages; empty: none
};

/// Computes the norm of the gradients of an optimizer's parameters in the context.
struct NormOfGradients {
  static constexpr wire::MessageType kType{0x0204};
  static constexpr std::string_view kName = "optim.norm";
  using Reply = GradientNorm;
  GlobalId id;
  std::uint64_t context = 0;
  double norm_type = 2;
};

/// Returns a copy of an optimizer's state.
struct ReadState {
  static constexpr wire::MessageType kType{0x0205};
  static constexpr std::string_view kName = "optim.read_state";
  using Reply = StateDict;
  GlobalId id;
  std::vector<double> rates;
};

struct WriteState {
  static constexpr wire::MessageType kType{0x0206};
  static constexpr std::string_view kName = "optim.write_state";
  using Reply = Unit;
  GlobalId id;
  StateDict state;
};

/// Copies an optimizer's state into a value on the receiver.
struct KeepState {
  static constexpr wire::MessageType kType{0x0207};
  static constexpr std::string_view kName = "optim.keep_state";
  using Reply = RRef<StateDict>;
  GlobalId id;
  std::vector<double> rates;
};

/// Loads a state that the receiver owns. Replies with the resulting learning rates of the groups.
struct TakeState {
  static constexpr wire::MessageType kType{0x0208};
  static constexpr std::string_view kName = "optim.take_state";
  using Reply = std::vector<double>;
  GlobalId id;
  RRef<StateDict> state;
};

/// Makes passes of this context step the receiver's parameters when their gradients are complete. The receiver
/// joins the context.
struct StepInBackward {
  static constexpr wire::MessageType kType{0x0209};
  static constexpr std::string_view kName = "optim.step_in_backward";
  using Reply = Unit;
  GlobalId id;
  std::uint64_t context = 0;
  std::vector<double> rates;
};

}  // namespace torchspan::optim

namespace torchspan {

template <>
struct Wire<optim::OptimizerTarget>
    : WireStruct<optim::OptimizerTarget, "optim.OptimizerTarget", &optim::OptimizerTarget::value,
                 &optim::OptimizerTarget::name> {};
template <>
struct Wire<optim::OptimizerGroup>
    : WireStruct<optim::OptimizerGroup, "optim.OptimizerGroup", &optim::OptimizerGroup::label,
                 &optim::OptimizerGroup::spec, &optim::OptimizerGroup::targets,
                 &optim::OptimizerGroup::hogwild> {};
template <>
struct Wire<optim::CreateOptimizer>
    : WireStruct<optim::CreateOptimizer, "optim.CreateOptimizer", &optim::CreateOptimizer::id,
                 &optim::CreateOptimizer::groups> {};
template <>
struct Wire<optim::StepOptimizer>
    : WireStruct<optim::StepOptimizer, "optim.StepOptimizer", &optim::StepOptimizer::id,
                 &optim::StepOptimizer::context, &optim::StepOptimizer::rates, &optim::StepOptimizer::scale> {
};
template <>
struct Wire<optim::StepInBackward>
    : WireStruct<optim::StepInBackward, "optim.StepInBackward", &optim::StepInBackward::id,
                 &optim::StepInBackward::context, &optim::StepInBackward::rates> {};
template <>
struct Wire<optim::DropOptimizer>
    : WireStruct<optim::DropOptimizer, "optim.DropOptimizer", &optim::DropOptimizer::id> {};
template <>
struct Wire<optim::GradientNorm>
    : WireStruct<optim::GradientNorm, "optim.GradientNorm", &optim::GradientNorm::norm,
                 &optim::GradientNorm::averaged, &optim::GradientNorm::own> {};
template <>
struct Wire<optim::NormOfGradients>
    : WireStruct<optim::NormOfGradients, "optim.NormOfGradients", &optim::NormOfGradients::id,
                 &optim::NormOfGradients::context, &optim::NormOfGradients::norm_type> {};
template <>
struct Wire<optim::ReadState>
    : WireStruct<optim::ReadState, "optim.ReadState", &optim::ReadState::id, &optim::ReadState::rates> {};
template <>
struct Wire<optim::WriteState>
    : WireStruct<optim::WriteState, "optim.WriteState", &optim::WriteState::id, &optim::WriteState::state> {};
template <>
struct Wire<optim::KeepState>
    : WireStruct<optim::KeepState, "optim.KeepState", &optim::KeepState::id, &optim::KeepState::rates> {};
template <>
struct Wire<optim::TakeState>
    : WireStruct<optim::TakeState, "optim.TakeState", &optim::TakeState::id, &optim::TakeState::state> {};

}  // namespace torchspan
