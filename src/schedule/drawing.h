#pragma once
#include <string_view>

#include <torchspan/schedule/schedule.h>

/// What the drawings share.
namespace torchspan::schedule {

/// Throws Error{kInvalid} that names the field unless idle, peak_live and live are as long as spans, and
/// spans and makespan fit together.
void check(const Timeline& timeline, std::string_view function);

/// The shortest span that takes any time; zero when none does.
Duration shortest_span(const Timeline& timeline);

/// The stages that a rank's spans are of, in order.
std::vector<int> stages_of(const std::vector<ActionSpan>& spans);

/// The letter of a kind: F, B, I, W.
char letter(ActionKind kind);

}  // namespace torchspan::schedule
