#include "autograd/passes/stall_survey.h"

#include <fmt/format.h>

namespace torchspan::autograd {

StallSurvey::StallSurvey(const std::vector<PartReport>& parts) {
  bool busy = false;
  std::uint64_t received = 0;
  for (const PartReport& part : parts) {
    busy = busy || part.busy || part.silent;
    if (part.silent) waiting += fmt::format("\n  worker '{}' does not answer", part.worker);
    if (part.busy) at_work += fmt::format("\n  worker '{}' is still running nodes", part.worker);
    for (const std::string& line : part.crowded)
      at_work += fmt::format("\n  worker '{}': {}", part.worker, line);
    executed += part.executed;
    sent += part.sent;
    received += part.received;
    for (const WaitingSend& send : part.waiting) {
      unanswered = unanswered || send.unanswered;
      waiting += fmt::format("\n  worker '{}' sent {} of '{}' to worker '{}' as message {:#x}{}{}",
                             part.worker, send.reply ? "the result" : "arguments", send.call, send.to,
                             send.message, send.site.empty() ? "" : fmt::format(", called at {}", send.site),
                             send.unanswered ? ", and got no result of that call" : "");
    }
  }
  quiet = !busy && sent == received && !waiting.empty();
}

const char* StallSurvey::stall_advice() const {
  if (unanswered) {
    return "backward() in FAST mode cannot end, because these sends get no gradient. FAST mode also waits "
           "for "
           "what a failed call sent in this context, even if the call was repeated: repeat the whole step in "
           "a new autograd::Context, or use PassMode::kSmart, which detects which sends take part:";
  }
  return "backward() in FAST mode cannot end, because these sends get no gradient: the loss does not depend "
         "on "
         "them. In the next step use PassMode::kSmart, which detects which sends take part, or detach what "
         "you "
         "do not use:";
}

bool StallSurvey::is_stalled_since(const StallSurvey& before) const {
  return before.quiet && quiet && executed == before.executed && sent == before.sent;
}

}  // namespace torchspan::autograd
