#include "rendezvous/client/death_log.h"

#include <fmt/format.h>
#include <utility>

namespace torchspan::rendezvous {
namespace {

/// How many deaths of one cause are named in warnings.
constexpr std::size_t kMostWarnings = 8;

}  // namespace

void DeathLog::write(const std::vector<std::string>& messages, const std::string& how) {
  if (messages.empty()) return;
  const TimePoint now = executor_.now();
  if (warned_ && now - *warned_ < FirstDeath::kConsequences) {
    if (!std::exchange(says_more_, true)) {
      log_.warning(
          fmt::format("more workers died less than {:g} s later: TORCHSPAN_LOG_LEVEL=info logs each of them",
                      to_seconds(FirstDeath::kConsequences)));
    }
    for (const std::string& message : messages) log_.info(message);
    return;
  }
  warned_ = now;
  says_more_ = false;
  for (std::size_t i = 0; i < messages.size() && i < kMostWarnings; ++i) log_.warning(messages[i]);
  if (messages.size() > kMostWarnings)
    log_.warning(fmt::format("{} more workers{}", messages.size() - kMostWarnings, how));
}

}  // namespace torchspan::rendezvous
