#pragma once
#include <string>
#include <utility>
#include <vector>

#include "core/api/timeout_notice.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// A timeout of one or more operations of a job, as the workers reported it.
struct Incident {
  std::vector<std::pair<int, TimeoutNotice>> notices;  ///< with the rank that reported it
  std::string page;                                    ///< path of the file with the page; empty: none
  std::string suspect;                                 ///< the most likely cause; may be empty
  std::string page_host = {};                          ///< host of the page, if that is another one

  /// Returns "rank 0: 'all_reduce' number 17 timed out after 30.0 s", for the first one.
  std::string headline() const;
  /// Returns the path of the page, with its host if that is another one; empty if there is no page.
  std::string place() const;
};

/// Returns the notice without control characters, which names of the program may contain.
TimeoutNotice printable(TimeoutNotice notice);

/// Returns "rank 0: 'all_reduce' number 17 timed out after 30.0 s; it waited for …".
std::string describe_notice(int rank, const TimeoutNotice& notice);

/// Adds the operations that timed out to the states of the workers, which no longer have them. A worker that reported
/// a timeout worked then, even if its process has ended since; workers without a state are named `prefix` and rank.
/// Pure.
void add_timed_out(const Incident& incident, const std::string& prefix, std::vector<WorkerReport>& workers);

/// Returns the page of an incident: what timed out, then the suspects and all workers; of those in `ranks` that have no
/// report it says so. Sets the incident's suspect.
std::string describe_incident(Incident& incident, const std::string& prefix,
                              std::vector<WorkerReport> workers, const std::vector<int>& ranks = {});

}  // namespace torchspan::launch
