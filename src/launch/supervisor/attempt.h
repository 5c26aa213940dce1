#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launch/display/board.h"
#include "launch/supervisor/endings.h"
#include "launch/supervisor/job_watch.h"
#include "launch/supervisor/worker.h"

namespace torchspan::launch {

/// The workers of a job from one start to the end of the last of them. Starts single workers again if the
/// options allow replacements. The destructor kills them.
class Attempt {
 public:
  Attempt(const AttemptContext& context, JobSetting setting);
  Attempt(const Attempt&) = delete;

  /// Starts the workers. Throws kInvalid if the program cannot be executed or a log cannot be written, and
  /// kOverloaded if the system cannot start all of them; started() says how many it could.
  void start();
  int started() const;
  /// Replacements that this attempt and earlier ones have used.
  int replacements_used() const { return replacements_.used(); }

  /// Whether it stops the workers, because of a failure or stop().
  bool stopping() const { return stopping_; }
  /// Whether all workers have ended and their output has been read.
  bool over() const;
  void handle(const Poller::Event& event);
  /// Does what is due at `now`.
  void advance(TimePoint now);
  Deadline next_deadline() const;

  /// Sends `signal` to all workers and kills those that still run after the options' grace period.
  void stop(int signal);
  /// Sends `signal` to the workers that have not got it, and kills those that still run after the preemption's
  /// grace period. SIGTERM goes to the workers' groups, any other signal to the workers themselves.
  void preempt(int signal);
  /// Kills the workers now.
  void kill_workers();
  /// Returns the signal that a worker has reported to have received, once; 0 if there is none.
  int take_reported_signal();

  /// Shows the last state of the workers' progress, completes endings(), and returns the operations that timed out.
  std::vector<Incident> finish();
  /// How the workers ended, in the order in which this was seen.
  const std::vector<Ending>& endings() const { return endings_; }
  /// All processes, which endings() names by their ids.
  const WorkerSet& workers() const { return workers_; }

 private:
  bool all_ended() const;
  void on_end(Worker& worker);
  void on_progress(const Worker& worker, std::string_view line);
  void settle(TimePoint now);
  std::optional<std::string> plan_replacements(TimePoint now);
  void replace(int rank);
  void stop_replacing();
  void say_no_progress();
  void end_leftovers(TimePoint now);

  const AttemptContext context_;
  const JobSetting setting_;
  const TimePoint began_;
  ProgressView view_;
  JobWatch watch_{context_, setting_, view_};
  WorkerSet workers_{context_, setting_};
  Replacements replacements_;
  std::vector<Ending> endings_;
  bool leftovers_killed_ = false;
  bool stopping_ = false;
  bool killed_ = false;          ///< the grace period has ended
  int preempted_by_ = 0;         ///< signal
  int reported_signal_ = 0;      ///< by a worker
  std::vector<bool> reporters_;  ///< by rank
  struct {
    Deadline settle, kill, drain;
    Deadline leave;     ///< for workers that others report as gone and whose processes still run
    Deadline progress;  ///< set by each report of a worker's Progress
  } until_;
};

}  // namespace torchspan::launch
