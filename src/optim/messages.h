#pragma once
#include <vector>

#include <torchspan/optim/recipe.h>
#include <torchspan/rpc/endpoint.h>
#include <torchspan/rpc/message.h>

namespace torchspan::optim {

/// Makes an optimizer over the parameters behind the references, which the receiver owns.
struct CreateOptimizer {
  static constexpr wire::MessageType kType{0x0201};
  static constexpr std::string_view kName = "optim.create";
  using Reply = Unit;
  GlobalId id;
  Recipe recipe;
  std::vector<rpc::ReferencePtr> targets;
};

/// Steps it with the gradients that the receiver has in the context.
struct StepOptimizer {
  static constexpr wire::MessageType kType{0x0202};
  static constexpr std::string_view kName = "optim.step";
  using Reply = Unit;
  GlobalId id;
  std::uint64_t context = 0;
};

struct DropOptimizer {
  static constexpr wire::MessageType kType{0x0203};
  static constexpr std::string_view kName = "optim.drop";
  using Reply = Unit;
  GlobalId id;
};

}  // namespace torchspan::optim

namespace torchspan {

template <>
struct Wire<rpc::ReferencePtr> {
  static std::string name() { return "Reference"; }
  static void encode(wire::Encoder& encoder, const rpc::ReferencePtr& value) { encoder.reference(value); }
  static rpc::ReferencePtr decode(wire::Decoder& decoder) {
    return std::static_pointer_cast<rpc::Reference>(decoder.reference());
  }
};
template <>
struct Wire<optim::CreateOptimizer>
    : WireStruct<optim::CreateOptimizer, "optim.CreateOptimizer", &optim::CreateOptimizer::id,
                 &optim::CreateOptimizer::recipe, &optim::CreateOptimizer::targets> {};
template <>
struct Wire<optim::StepOptimizer> : WireStruct<optim::StepOptimizer, "optim.StepOptimizer",
                                               &optim::StepOptimizer::id, &optim::StepOptimizer::context> {};
template <>
struct Wire<optim::DropOptimizer>
    : WireStruct<optim::DropOptimizer, "optim.DropOptimizer", &optim::DropOptimizer::id> {};

}  // namespace torchspan
