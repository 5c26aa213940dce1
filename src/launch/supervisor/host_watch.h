#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "launch/supervisor/worker_set.h"
#include "launch/watch/host_report.h"
#include "launch/watch/incident.h"

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
  struct Told {
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
  std::optional<Told> told_ TORCHSPAN_GUARDED_BY(mutex_);
  bool examining_ TORCHSPAN_GUARDED_BY(mutex_) = false;  ///< the workers are being asked for an incident
  std::vector<WorkerReport> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  TimePoint workers_at_ TORCHSPAN_GUARDED_BY(mutex_){};
  std::vector<HostReport> others_ TORCHSPAN_GUARDED_BY(mutex_);
  const std::unique_ptr<Poller> server_poller_;
  Thread server_, collector_;
};

}  // namespace torchspan::launch
