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
  static constexpr FixedString kWireName = "optim.OptimizerTarget";
  rpc::ReferencePtr value;
  std::string name;
};

struct OptimizerGroup {
  static constexpr FixedString kWireName = "optim.OptimizerGroup";
  std::string label;
  OptimizerSpec spec;
  std::vector<OptimizerTarget> targets;
  bool hogwild = false;
};

/// Creates an optimizer over the parameters that the references name, which the receiver owns.
struct CreateOptimizer {
  static constexpr wire::MessageType kType{0x0201};
  static constexpr std::string_view kName = "optim.create";
  static constexpr FixedString kWireName = "optim.CreateOptimizer";
  using Reply = Unit;
  GlobalId id;
  std::vector<OptimizerGroup> groups;
};

/// Steps an optimizer with the receiver's gradients of the context.
struct StepOptimizer {
  static constexpr wire::MessageType kType{0x0202};
  static constexpr std::string_view kName = "optim.step";
  static constexpr FixedString kWireName = "optim.StepOptimizer";
  using Reply = bool;  ///< whether a pass has begun in the context, as far as the receiver knows
  GlobalId id;
  std::uint64_t context = 0;
  std::vector<double> rates;  ///< learning rates by group; NaN keeps a group's rate
  double scale = 1;           ///< factor of the gradients
};

struct DropOptimizer {
  static constexpr wire::MessageType kType{0x0203};
  static constexpr std::string_view kName = "optim.drop";
  static constexpr FixedString kWireName = "optim.DropOptimizer";
  using Reply = Unit;
  GlobalId id;
};

/// An owner's part in clipping gradients.
struct GradientNorm {
  static constexpr FixedString kWireName = "optim.GradientNorm";
  double norm = 0;
  std::string averaged;  ///< a parameter whose gradient a reducer averages; empty: none
  std::string own;       ///< a parameter whose gradient no reducer averages; empty: none
};

/// Computes the norm of the gradients of an optimizer's parameters in the context.
struct NormOfGradients {
  static constexpr wire::MessageType kType{0x0204};
  static constexpr std::string_view kName = "optim.norm";
  static constexpr FixedString kWireName = "optim.NormOfGradients";
  using Reply = GradientNorm;
  GlobalId id;
  std::uint64_t context = 0;
  double norm_type = 2;
};

/// Returns a copy of an optimizer's state.
struct ReadState {
  static constexpr wire::MessageType kType{0x0205};
  static constexpr std::string_view kName = "optim.read_state";
  static constexpr FixedString kWireName = "optim.ReadState";
  using Reply = StateDict;
  GlobalId id;
  std::vector<double> rates;
};

struct WriteState {
  static constexpr wire::MessageType kType{0x0206};
  static constexpr std::string_view kName = "optim.write_state";
  static constexpr FixedString kWireName = "optim.WriteState";
  using Reply = Unit;
  GlobalId id;
  StateDict state;
};

/// Copies an optimizer's state into a value on the receiver.
struct KeepState {
  static constexpr wire::MessageType kType{0x0207};
  static constexpr std::string_view kName = "optim.keep_state";
  static constexpr FixedString kWireName = "optim.KeepState";
  using Reply = RRef<StateDict>;
  GlobalId id;
  std::vector<double> rates;
};

/// Loads a state that the receiver owns. Replies with the resulting learning rates of the groups.
struct TakeState {
  static constexpr wire::MessageType kType{0x0208};
  static constexpr std::string_view kName = "optim.take_state";
  static constexpr FixedString kWireName = "optim.TakeState";
  using Reply = std::vector<double>;
  GlobalId id;
  RRef<StateDict> state;
};

/// Makes passes of this context step the receiver's parameters when their gradients are complete. The receiver
/// joins the context.
struct StepInBackward {
  static constexpr wire::MessageType kType{0x0209};
  static constexpr std::string_view kName = "optim.step_in_backward";
  static constexpr FixedString kWireName = "optim.StepInBackward";
  using Reply = Unit;
  GlobalId id;
  std::uint64_t context = 0;
  std::vector<double> rates;
};

}  // namespace torchspan::optim
