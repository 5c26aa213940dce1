#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace torchspan::rendezvous {

/// The state of a process in /proc.
struct ProcessStat {
  char state = '?';               ///< field 3: R, S, D, Z, T (stopped), t (traced), …
  std::uint64_t start_ticks = 0;  ///< field 22
  bool stopped() const { return state == 'T' || state == 't'; }
};

/// Parses the text of /proc/<pid>/stat; nullopt if it is malformed. The command name, which the process
/// chooses, may contain any byte.
std::optional<ProcessStat> parse_process_stat(std::string_view text);

/// The current stat of the process; nullopt if there is no such process or it cannot be read.
std::optional<ProcessStat> read_process_stat(std::int64_t pid);

}  // namespace torchspan::rendezvous
