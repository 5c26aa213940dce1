#pragma once
#include <string_view>

#include <torchspan/schedule.h>

/// Functions that both drawings use.
namespace torchspan::schedule {

/// Throws Error{kInvalid} that names the field unless idle, peak_live, live and weight_inputs (if any) are as
/// long as spans, and spans and makespan are consistent.
void check(const Timeline& timeline, std::string_view function);

/// The shortest span longer than zero; zero if there is none.
Duration shortest_span(const Timeline& timeline);

/// The stages of a rank's spans, in order.
std::vector<int> stages_of(const std::vector<ActionSpan>& spans);

/// The letter of a kind: F, B, I, W.
char letter(ActionKind kind);

}  // namespace torchspan::schedule
