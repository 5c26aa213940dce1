#pragma once
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>

#include "core/api/timeout_notice.h"
#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// What the launcher of one host says about its workers, or why it says nothing.
struct HostReport {
  int node = 0;                                             ///< node rank of the host
  std::string host = {};                                    ///< its name; may be empty
  std::string trouble = {};                                 ///< why it did not answer; empty: it did
  std::vector<WorkerReport> workers = {};                   ///< by rank
  std::vector<std::pair<int, TimeoutNotice>> notices = {};  ///< of its last incident, with the rank
  std::string page = {};  ///< path of the page that it writes for them; empty: it writes none
  bool written = false;   ///< the page is complete
};

/// What the launcher of this host tells `torchspan stacks` and `torchspan top`.
struct JobReport {
  int node = 0;
  std::string host = {};
  int workers = 1;          ///< on each host
  std::string prefix = {};  ///< of the workers' names
  std::vector<HostReport> others = {};
};

/// Leaves out what exceeds some limits, so that a report has at most some MiB.
std::string encode_host_report(const HostReport& report);
/// Returns nullopt for anything that encode_host_report() does not return. Pure; accepts any text.
std::optional<HostReport> decode_host_report(std::string_view text);

std::string encode_job_report(const JobReport& report);
/// Returns nullopt for anything that encode_job_report() does not return. Pure; accepts any text.
std::optional<JobReport> decode_job_report(std::string_view text);

/// Returns "host 1 (gpu07)".
std::string name_of_host(int node, const std::string& host);

/// Returns the workers of all hosts, by rank: `mine`, of this host, and those of the others. Ranks without a report get
/// one that says why. `job`: this host and the reports of the others. Pure.
std::vector<WorkerReport> merge_hosts(std::vector<WorkerReport> mine, const JobReport& job);

}  // namespace torchspan::launch
