#pragma once
#include <csignal>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/executor.h>

namespace torchspan::launch {

/// The signal that ends a running job, or none.
struct Interruption {
  int signal = 0;           ///< 0: none
  bool preemption = false;  ///< the workers were given time to write a checkpoint
  bool reported = false;    ///< by a worker or another launcher; this launcher has not got the signal itself
  int clean_code = 0;       ///< the launcher's exit code if every worker then exits with 0
};

/// What the launcher does about a signal.
enum class Reaction {
  kNone,     ///< ignore it
  kPreempt,  ///< forward it to the workers, once, and give them the grace period
  kStop,     ///< stop the workers
  kKill,     ///< kill the workers
};

/// Decides what `signal` does to a job that `interruption` describes, and notes it there. SIGTERM and
/// `preempt_signal` preempt; a repeated `preempt_signal` has no effect, so that a batch system may send it to
/// every process; SIGTERM may follow it. Any other second signal kills the workers, except that SIGINT and
/// SIGHUP stop a job that has been preempted. `reported`: a worker or another launcher has got it. A batch system sends a
/// signal to all of them, in any order: that is one signal.
Reaction react(Interruption& interruption, int signal, int preempt_signal, bool reported = false);

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

/// How many workers an attempt may have.
struct WorkerRange {
  int least = 1;
  int most = 1;
};

/// The largest number of workers on one host.
inline constexpr int kMostWorkers = 4096;

/// Parses "4", or "2:4" for a range. Throws kInvalid, naming `option`, unless 1 <= least <= most <= 4096.
WorkerRange parse_workers(std::string_view text, std::string_view option);

/// An attempt whose first failure comes within this time of its start has failed at once.
inline constexpr Duration kAtOnce = std::chrono::seconds(10);

/// When a failed job starts again.
struct RestartPolicy {
  int most = 0;                                        ///< restarts with the same number of workers or more
  Duration backoff = std::chrono::seconds(1);          ///< before the first; doubles with each failure
  Duration longest_backoff = std::chrono::minutes(1);  ///< limit of the doubling
  Duration healthy_after = std::chrono::minutes(5);    ///< an attempt that ran this long resets the doubling
  int give_up_after = 3;      ///< ends after so many attempts in a row with one failure at once; 0: never
  int most_replacements = 0;  ///< of single workers while the others go on, in all attempts together
};

/// How one attempt failed.
struct AttemptResult {
  int workers = 1;
  int started = 1;  ///< less than `workers` if the system could not start all of them
  Duration ran{0};  ///< from its start to its first failure
  int code = 0;     ///< exit code of the first failure, if no signal ended it
  int signal = 0;   ///< the signal that ended it, or 0
};

/// What follows a failed attempt.
struct NextAttempt {
  int workers = 0;    ///< 0: none, the job ends
  Duration delay{0};  ///< before it
  std::string
      reason;  ///< a sentence for the user: why it ends, or has another number of workers; may be empty
};

/// Decides what follows the last of `attempts`, which has failed. Restarts with the same number of workers
/// while restarts are left and the failure does not repeat at once, or with range.most again if the attempt ran for
/// policy.healthy_after with fewer; then with one worker fewer, or as many as could be started, while there are more
/// than range.least. Exit codes 126 and 127 end the job.
NextAttempt next_attempt(const RestartPolicy& policy, WorkerRange range,
                         const std::vector<AttemptResult>& attempts);

/// Decides which failed workers of an attempt start again while the others go on, and when. Pure: no clock.
/// The first process of a rank is its incarnation 0; each replacement is the next one.
class Replacements {
 public:
  /// `used`: replacements of earlier attempts, which count toward policy.most_replacements.
  Replacements(const RestartPolicy& policy, int used) : policy_(policy), used_(used) {}

  /// Plans a replacement for each of `failed`, or for none of them. Returns why there is none; an empty text if
  /// replacements are off, or after `stop()`. Rank 0 serves the store, so it cannot be replaced.
  std::optional<std::string> plan(const std::vector<Ending>& failed, TimePoint now);
  /// Returns the ranks whose time has come, once each.
  std::vector<int> take_due(TimePoint now);
  /// Forgets the planned replacements and plans no more. Returns the ranks that were waiting.
  std::vector<int> stop();

  bool waiting() const { return !waiting_.empty(); }
  Deadline next() const;
  /// When the planned replacement of a rank starts. Requires that there is one.
  TimePoint start_of(int rank) const { return waiting_.at(rank); }
  /// How many processes of the rank were replaced or are to be replaced.
  int incarnation(int rank) const;
  /// In this attempt and earlier ones.
  int used() const { return used_; }

 private:
  std::optional<std::string> reason_against(const Ending& failed) const;

  const RestartPolicy policy_;
  int used_;
  bool stopped_ = false;
  std::map<int, std::vector<AttemptResult>> failures_;  ///< of replaced processes, by rank
  std::map<int, TimePoint> waiting_;                    ///< by rank: when the replacement starts
};

}  // namespace torchspan::launch
