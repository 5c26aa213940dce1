#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/rpc/message.h>

#include "elastic/rule/generation.h"

namespace torchspan::elastic {

/// The next generation, or why there is none.
struct GenerationAnswer {
  Generation generation;
  std::optional<Error> refusal;
};

/// Asks rank 0 for the next generation of a trainer; answered once it is decided.
struct AwaitGeneration {
  static constexpr wire::MessageType kType{0x0601};
  static constexpr std::string_view kName = "elastic.generation";
  using Reply = GenerationAnswer;
  std::string trainer;
  Report report;
};

/// The sender takes no part in a trainer any more.
struct Withdraw {
  static constexpr wire::MessageType kType{0x0602};
  static constexpr std::string_view kName = "elastic.withdraw";
  using Reply = Unit;
  std::string trainer;
  std::string why;
};

}  // namespace torchspan::elastic

namespace torchspan {

template <>
struct Wire<elastic::Report>
    : WireStruct<elastic::Report, "elastic.Report", &elastic::Report::generation, &elastic::Report::committed,
                 &elastic::Report::holds_state, &elastic::Report::prepared, &elastic::Report::finished,
                 &elastic::Report::min_ranks, &elastic::Report::late_limit, &elastic::Report::too_few_limit> {
};
template <>
struct Wire<elastic::Generation>
    : WireStruct<elastic::Generation, "elastic.Generation", &elastic::Generation::number,
                 &elastic::Generation::step, &elastic::Generation::ranks, &elastic::Generation::holders,
                 &elastic::Generation::complete> {};
template <>
struct Wire<elastic::GenerationAnswer>
    : WireStruct<elastic::GenerationAnswer, "elastic.GenerationAnswer",
                 &elastic::GenerationAnswer::generation, &elastic::GenerationAnswer::refusal> {};
template <>
struct Wire<elastic::AwaitGeneration>
    : WireStruct<elastic::AwaitGeneration, "elastic.AwaitGeneration", &elastic::AwaitGeneration::trainer,
                 &elastic::AwaitGeneration::report> {};
template <>
struct Wire<elastic::Withdraw> : WireStruct<elastic::Withdraw, "elastic.Withdraw",
                                            &elastic::Withdraw::trainer, &elastic::Withdraw::why> {};

}  // namespace torchspan
