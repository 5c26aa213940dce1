#include "autograd/survey.h"

#include <fmt/format.h>

namespace torchspan::autograd {

Survey::Survey(const std::vector<PartReport>& parts) {
  bool busy = false;
  std::uint64_t received = 0;
  for (const PartReport& part : parts) {
    busy = busy || part.busy || part.silent;
    if (part.silent) waiting += fmt::format("\n  worker '{}' does not answer", part.worker);
    if (part.busy) at_work += fmt::format("\n  worker '{}' is still at work", part.worker);
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

const char* Survey::stall_advice() const {
  if (unanswered) {
    return "backward() in FAST mode cannot end: these sends get no gradient. A call that failed leaves what "
           "it "
           "sent in its context, where FAST mode waits for it, also when the call was repeated: repeat the "
           "whole step in a new autograd::Context, or use PassMode::kSmart, which finds out what takes part:";
  }
  return "backward() in FAST mode cannot end: these sends get no gradient, since what was made of them is "
         "not "
         "part of the loss. In the next step use PassMode::kSmart, which finds out what takes part, or "
         "detach "
         "what you do not use:";
}

bool Survey::stands_still_since(const Survey& before) const {
  return before.quiet && quiet && executed == before.executed && sent == before.sent;
}

}  // namespace torchspan::autograd
