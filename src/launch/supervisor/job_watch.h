#pragma once
#include <memory>
#include <string>
#include <vector>

#include "launch/display/progress_view.h"
#include "launch/supervisor/host_watch.h"
#include "launch/supervisor/worker_set.h"
#include "launch/watch/incident.h"
#include "launch/watch/state_questions.h"

namespace torchspan::launch {

/// Asks the workers of an attempt what they do: twice per second for the live block of a terminal, and after a timeout
/// for the page of `torchspan stacks`. Writes at most five pages per attempt, and none within 30 seconds of another:
/// later timeouts are added to the last page. In a job on several hosts, a page covers the workers of all, and one
/// host writes it.
class JobWatch {
 public:
  /// `context` and `view` must outlive it.
  JobWatch(const AttemptContext& context, const JobSetting& setting, ProgressView& view);

  /// Handles an event of the poller whose source is kState.
  void handle(const Poller::Event& event) { questions_.handle(event); }
  /// An operation of `rank` timed out.
  void on_timeout(int rank, const TimeoutNotice& notice);
  void advance(TimePoint now);
  Deadline next() const;
  /// Whether a page is being made; workers that are stopped now could not answer.
  bool is_examining() const { return wanted_ || examining_; }
  /// Writes the page of an incident that is being examined, with the answers so far.
  void finish();
  const std::vector<Incident>& incidents() const { return incidents_; }

 private:
  void begin_round(TimePoint now);
  void end_round(TimePoint now);
  /// Adds the workers and the timeouts of the other hosts; returns all workers.
  std::vector<WorkerReport> add_hosts(std::vector<WorkerReport> workers);
  void write_page(std::vector<WorkerReport> workers);
  std::string page_path() const;
  bool hosts_wait() const { return hosts_ && hosts_->is_waiting(); }
  void add_to_last_page(int rank, const TimeoutNotice& notice);

  const AttemptContext& context_;
  const JobSetting& setting_;
  ProgressView& view_;
  StateQuestions questions_;
  std::unique_ptr<HostWatch> hosts_;  ///< null if the job runs on one host
  std::vector<Incident> incidents_;
  bool wanted_ = false;     ///< the last incident has no page yet, and no worker was asked for it
  bool examining_ = false;  ///< the workers were asked for the last incident
  bool asking_ = false;
  bool read_last_ = false;  ///< the round ends after one more look at the poller
  TimePoint examined_at_{};
  Deadline next_round_, round_end_, notices_end_;
};

}  // namespace torchspan::launch
