#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace torchspan::rendezvous {

/// What /proc says about a process.
struct ProcessStat {
  char state = '?';               ///< field 3: R, S, D, Z, T (stopped), t (traced), …
  std::uint64_t start_ticks = 0;  ///< field 22
  bool stopped() const { return state == 'T' || state == 't'; }
};

/// Reads the text of /proc/<pid>/stat; nothing when it is none. The command's name, which the process chooses
/// itself, may hold anything.
std::optional<ProcessStat> parse_process_stat(std::string_view text);

/// The process's stat, now; nothing when there is no such process or it cannot be read.
std::optional<ProcessStat> read_process_stat(std::int64_t pid);

}  // namespace torchspan::rendezvous
