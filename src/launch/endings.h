#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::launch {

/// How a worker's process ended.
struct Ending {
  int rank = 0;
  std::string name;
  long pid = 0;
  int code = 0;        ///< exit code, when no signal ended it
  int signal = 0;      ///< the signal that ended it, or 0
  bool asked = false;  ///< after we had asked it to stop
  Duration after{0};   ///< from the start of the job
  long blames = 0;     ///< the process whose death or early end it says it heard of, or 0

  bool failed() const { return code != 0 || signal != 0; }
  /// Whether the launcher's own signal ended it: no failure of the worker.
  bool stopped() const;
};

/// "SIGKILL"; "signal 64" for one without a name.
std::string signal_name(int signal);
/// "exited with code 3", "was killed by SIGKILL (…)".
std::string describe(const Ending& ending);

/// The same of a job's first failure: one that others blame for having gone may have ended without an error.
std::string describe_failure(const Ending& ending);

/// How close together failures count as one event, so that its cause may be seen after its consequence: a
/// peer notices a death some microseconds before the system reports it.
inline constexpr Duration kSettleTime = std::chrono::milliseconds(50);

/// Index of the failure that came first, from endings in the order they were seen; nothing when none failed
/// by itself. Within kSettleTime a crash (SIGKILL, SIGSEGV, …), which no peer's death brings about, goes
/// before exit codes and aborts, which it does. A worker that this one blames goes before it, whenever it
/// ended, unless the launcher's signal ended it: a process may close its connections long before it exits.
std::optional<std::size_t> first_failure(const std::vector<Ending>& endings);

/// The process of whose death, or end without shutdown(), a worker's last words tell, or 0.
long blamed_process(const std::vector<std::string>& last_words);

/// The launcher's own exit code: 128 + the signal that interrupted it, else that of the first failure (code,
/// or 128 + signal), else 0.
int exit_code(const std::vector<Ending>& endings, int interrupted_by);

/// The summary after a failed job: the first failure with its last words, what became of the others, the
/// code.
std::string summarize(const std::vector<Ending>& endings, const std::vector<std::string>& last_words,
                      int interrupted_by);

}  // namespace torchspan::launch
