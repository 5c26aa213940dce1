#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/time.h>

namespace torchspan::launch {

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

}  // namespace torchspan::launch
