#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "launch/display/board.h"
#include "launch/supervisor/worker.h"
#include "launch/watch/host_report.h"
#include "launch/watch/incident.h"
#include "launch/watch/running_job.h"

namespace torchspan::launch {

/// The part of an attempt in the questions between the hosts of its job: answers other launchers and `torchspan stacks`,
/// and asks the other launchers for a page. Used by the launcher's thread, which never waits for it.
class HostWatch {
 public:
  /// `context`, whose link is not null, and `setting` must outlive it.
  HostWatch(const AttemptContext& context, const JobSetting& setting);
  /// Ends questions that have no answer yet, within a tenth of a second.
  ~HostWatch();
  HostWatch(const HostWatch&) = delete;

  /// Asks the other launchers, and wakes the poller when they have answered; after 4 seconds at the latest.
  void begin();
  /// Whether their answers are outstanding.
  bool is_waiting() const { return waiting_; }
  /// Returns their answers; those that are outstanding say so.
  JobReport take();

  /// States what others are sent about an incident: `page` is the path of the page that this host writes, or empty.
  void set_incident(const Incident& incident, bool written);
  /// States the workers' answers of this moment; others get them instead of asking again.
  void set_workers(std::vector<WorkerReport> workers);

 private:
  /// What other launchers are sent about an incident.
  struct PublishedIncident {
    Incident incident;
    bool written = false;
    TimePoint at{};
  };

  JobReport job_report(std::vector<HostReport> others) const;
  HostReport describe(bool brief, const std::atomic<bool>& stopping);
  std::vector<WorkerReport> describe_workers(const std::atomic<bool>& stopping);
  void collect();
  void serve();

  const AttemptContext& context_;
  const JobSetting& setting_;
  const std::string host_;
  std::atomic<bool> stopping_{false}, waiting_{false};
  Mutex mutex_;
  std::optional<PublishedIncident> published_ TORCHSPAN_GUARDED_BY(mutex_);
  bool examining_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the workers are being asked for an incident
  std::vector<WorkerReport> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint workers_at_ TORCHSPAN_GUARDED_BY(mutex_){};
  std::vector<HostReport> others_ TORCHSPAN_GUARDED_BY(mutex_);
  const std::unique_ptr<Poller> server_poller_;
  Thread server_, collector_;
};

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
