#pragma once
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/time.h>

#include "launch/supervisor/interruption.h"

namespace torchspan::launch {

/// A worker's process. Another host may have a process with the same pid.
struct RankProcess {
  int rank = -1;  ///< in the job; -1: none
  long pid = 0;
  friend bool operator==(const RankProcess&, const RankProcess&) = default;
};

/// How a worker's process ended.
struct Ending {
  int rank = 0;  ///< in the job
  std::string name;
  long pid = 0;
  int code = 0;          ///< exit code, if no signal ended it
  int signal = 0;        ///< the signal that ended it, or 0
  bool asked = false;    ///< it ended after the launcher had asked it to stop
  Duration after{0};     ///< from the start of the job
  RankProcess blames{};  ///< the process whose death or early end it reports, or none
  int incarnation = 0;   ///< how many processes the rank had before this one
  bool replaced =
      false;        ///< it failed, and the launcher starts the worker again: a failure only if one blames it
  Duration ran{0};  ///< from the start of the process

  RankProcess process() const { return {rank, pid}; }
  bool failed() const { return code != 0 || signal != 0; }
  /// Whether the launcher's own signal ended it; that is not a failure of the worker.
  bool stopped() const;
};

/// Whether a signal ends a process by a crash, which the death of a peer does not cause: SIGKILL, SIGSEGV, ….
bool is_crash(int signal);
/// Returns "SIGKILL"; "signal 64" for a signal without a name.
std::string signal_name(int signal);
/// Returns "exited with code 3", "was killed by SIGKILL (…)".
std::string describe(const Ending& ending);

/// The same for a job's first failure: a worker that others blame for leaving may have ended without an
/// error.
std::string describe_failure(const Ending& ending);

/// Failures this close together count as one event, whose cause may be seen after its consequence: a peer
/// notices a death some microseconds before the system reports it.
inline constexpr Duration kSettleTime = std::chrono::milliseconds(50);

/// The job survived the death of a replaced worker if another one ends later than this after it.
inline constexpr Duration kCauseTime = std::chrono::seconds(60);

/// Index of the failure that came first, from endings in the order in which they were seen; nullopt if no
/// worker failed by itself. Failures of replaced workers count only as causes of others, within kCauseTime. Within
/// kSettleTime, a crash (SIGKILL, SIGSEGV, …) precedes exit codes and aborts, because a peer's death can cause those and
/// not a crash. A worker that this one blames precedes it unless the launcher's signal ended it: a process may close its
/// connections long before it exits.
std::optional<std::size_t> first_failure(const std::vector<Ending>& endings);

/// Returns the process whose death, or end without shutdown(), a worker's last lines report; none if they report none.
RankProcess blamed_process(const std::vector<std::string>& last_lines);

/// Returns the exit code that a first failure gives: its exit code, or 128 + its signal. 0 without a failure.
int failure_code(const std::vector<Ending>& endings);
/// Returns the launcher's own exit code: after an interruption 128 + its signal, or interruption.clean_code if
/// it was a preemption and every worker exited with 0; else failure_code().
int exit_code(const std::vector<Ending>& endings, const Interruption& interruption);

/// What is known about a first failure besides its ending.
struct FailureDetails {
  std::string error = {};                    ///< from the worker's error file; may be empty
  std::vector<std::string> last_lines = {};  ///< of its standard error
};

/// Returns a line for each worker that was replaced: how often, and the last failure that it was replaced for.
std::string describe_replacements(const std::vector<Ending>& endings);

/// Returns the first failure of an attempt: worker, ending, time, error and last lines; empty if there is none.
std::string describe_first_failure(const std::vector<Ending>& endings, const FailureDetails& details);

/// Returns the summary of a job's last attempt if it failed or was interrupted: the first failure, how the
/// others ended, and the exit code. Empty after a success.
std::string summarize(const std::vector<Ending>& endings, const FailureDetails& details,
                      const Interruption& interruption);

}  // namespace torchspan::launch
