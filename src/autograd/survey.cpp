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
    executed += part.executed;
    sent += part.sent;
    received += part.received;
    for (const WaitingSend& send : part.waiting) {
      waiting += fmt::format("\n  worker '{}' sent {} of '{}' to worker '{}' as message {:#x}{}", part.worker,
                             send.reply ? "the result" : "arguments", send.call, send.to, send.message,
                             send.site.empty() ? "" : fmt::format(", called at {}", send.site));
    }
  }
  quiet = !busy && sent == received && !waiting.empty();
}

bool Survey::stands_still_since(const Survey& before) const {
  return before.quiet && quiet && executed == before.executed && sent == before.sent;
}

}  // namespace torchspan::autograd
