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
  Generation generation;
  std::optional<Error> refusal;
};

/// Asks rank 0 for the next generation of a trainer; answered once it is decided.
struct AwaitGeneration {
  static constexpr wire::MessageType kType{0x0601};
  static constexpr std::string_view kName = "quorum.generation";
  using Reply = GenerationAnswer;
  std::string trainer;
  Report report;
};

/// The sender takes no part in a trainer any more.
struct Withdraw {
  static constexpr wire::MessageType kType{0x0602};
  static constexpr std::string_view kName = "quorum.withdraw";
  using Reply = Unit;
  std::string trainer;
  std::string why;
};

/// Asks rank 0 whether the sender should report: a rank waits to join a trainer, or the current generation lacks the sender
/// or has lost a member.
struct AskAwaited {
  static constexpr wire::MessageType kType{0x0603};
  static constexpr std::string_view kName = "quorum.awaited";
  using Reply = bool;
  std::string trainer;
};

}  // namespace torchspan::quorum

namespace torchspan {

template <>
struct Wire<quorum::AskAwaited>
    : WireStruct<quorum::AskAwaited, "quorum.AskAwaited", &quorum::AskAwaited::trainer> {};

template <>
struct Wire<quorum::Report>
    : WireStruct<quorum::Report, "quorum.Report", &quorum::Report::generation, &quorum::Report::committed,
                 &quorum::Report::holds_state, &quorum::Report::prepared, &quorum::Report::target,
                 &quorum::Report::min_ranks, &quorum::Report::late_limit, &quorum::Report::too_few_limit> {};
template <>
struct Wire<quorum::Generation>
    : WireStruct<quorum::Generation, "quorum.Generation", &quorum::Generation::number,
                 &quorum::Generation::step, &quorum::Generation::target, &quorum::Generation::ranks,
                 &quorum::Generation::holders, &quorum::Generation::complete> {};
template <>
struct Wire<quorum::GenerationAnswer>
    : WireStruct<quorum::GenerationAnswer, "quorum.GenerationAnswer", &quorum::GenerationAnswer::generation,
                 &quorum::GenerationAnswer::refusal> {};
template <>
struct Wire<quorum::AwaitGeneration>
    : WireStruct<quorum::AwaitGeneration, "quorum.AwaitGeneration", &quorum::AwaitGeneration::trainer,
                 &quorum::AwaitGeneration::report> {};
template <>
struct Wire<quorum::Withdraw>
    : WireStruct<quorum::Withdraw, "quorum.Withdraw", &quorum::Withdraw::trainer, &quorum::Withdraw::why> {};

}  // namespace torchspan
