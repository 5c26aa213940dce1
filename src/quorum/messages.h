#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/rpc/message.h>

#include "quorum/api/generation.h"

namespace torchspan::quorum {

/// The next generation, or why there is none.
struct GenerationAnswer {
  static constexpr FixedString kWireName = "quorum.GenerationAnswer";
  Generation generation;
  std::optional<Error> refusal;
};

/// Asks rank 0 for the next generation of a trainer; answered once it is decided.
struct AwaitGeneration {
  static constexpr wire::MessageType kType{0x0601};
  static constexpr std::string_view kName = "quorum.generation";
  static constexpr FixedString kWireName = "quorum.AwaitGeneration";
  using Reply = GenerationAnswer;
  std::string trainer;
  Report report;
};

/// The sender takes no part in a trainer any more.
struct Withdraw {
  static constexpr wire::MessageType kType{0x0602};
  static constexpr std::string_view kName = "quorum.withdraw";
  static constexpr FixedString kWireName = "quorum.Withdraw";
  using Reply = Unit;
  std::string trainer;
  std::string why;
};

/// Asks rank 0 whether the sender should report: a rank waits to join a trainer, or the current generation lacks the sender
/// or has lost a member.
struct AskAwaited {
  static constexpr wire::MessageType kType{0x0603};
  static constexpr std::string_view kName = "quorum.awaited";
  static constexpr FixedString kWireName = "quorum.AskAwaited";
  using Reply = bool;
  std::string trainer;
};

}  // namespace torchspan::quorum

namespace torchspan {

template <>
struct Wire<quorum::Report> : WireStruct<quorum::Report, "quorum.Report"> {};
template <>
struct Wire<quorum::Generation> : WireStruct<quorum::Generation, "quorum.Generation"> {};
}  // namespace torchspan
