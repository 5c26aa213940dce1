#include "collective/device/device_engine.h"

#include <fmt/format.h>

#include "collective/world_link.h"

namespace torchspan::collective {

Error lost_member(const std::string& peer, const std::string& how) {
  return {ErrorKind::kDisconnected,
          fmt::format("{}, and the group cannot continue without it", text_of_gone(peer, how))};
}

bool all_ranks_end(const EngineParts& parts) noexcept {
  try {
    if (parts.failure->get()) return false;
    parts.control->barrier(std::chrono::seconds(5));
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace torchspan::collective
