#include "rendezvous/api/process_stat.h"

#include <fmt/format.h>
#include <sstream>
#include <string>

#include "core/api/system_files.h"

namespace torchspan::rendezvous {

std::optional<ProcessStat> parse_process_stat(std::string_view text) {
  constexpr int kStartTime = 22;
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string_view::npos) return std::nullopt;
  std::istringstream fields{std::string(text.substr(name_end + 1))};
  ProcessStat stat;
  if (!(fields >> stat.state)) return std::nullopt;
  std::string skipped;
  for (int field = 4; field < kStartTime; ++field) fields >> skipped;
  if (!(fields >> stat.start_ticks)) return std::nullopt;
  return stat;
}

std::optional<ProcessStat> read_process_stat(std::int64_t pid) {
  return parse_process_stat(read_system_file(fmt::format("/proc/{}/stat", pid)));
}

}  // namespace torchspan::rendezvous
