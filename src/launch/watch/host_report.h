#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchspan/core/bytes.h>

#include "core/api/timeout_notice.h"

namespace torchspan::launch {

/// What one worker of a running job does, as it says itself and as the kernel sees it. Ages are seconds.
struct WorkerReport {
  struct Operation {
    std::string kind, name;
    double seconds = 0;
    std::uint64_t id = 0;  ///< sequence number of a reduction or a collective operation, pass id, …
    int part = -1;         ///< group of a collective operation or a message
    int peer = -1;         ///< of a message: the other rank, if it is known
  };
  struct Call {
    std::string name;
    std::string peer;  ///< worker name: callee of a pending call, caller of a served one
    std::string site;  ///< "train.cpp:41"; empty: unknown
    double seconds = 0;
    bool begun = true;  ///< served calls: the handler runs
  };
  /// The worker's part in a backward pass.
  struct Pass {
    std::uint64_t id = 0;
    bool busy = false;               ///< it runs nodes of the graph
    std::vector<std::string> waits;  ///< tensors that it sent and that have no gradient yet
  };

  int rank = 0;
  int world = 0;  ///< workers of the job; 0: unknown
  std::string name;
  std::string host;
  int node = -1;             ///< node rank of its host; -1: the job runs on one host
  std::string trouble = {};  ///< why nothing is known about it
  bool host_silent = false;  ///< because the launcher of its host did not answer
  std::int64_t process = 0;
  char process_state = '?';  ///< of /proc: R, S, D, T (stopped), t (traced), Z
  bool answers = true;
  double seconds = 0;  ///< since the worker joined
  double processor_seconds = 0;
  std::uint64_t resident_bytes = 0;
  std::uint64_t calls_sent = 0;
  std::uint64_t queued = 0;      ///< calls that wait for a thread
  std::uint64_t references = 0;  ///< values here that other workers reference
  std::map<int, std::uint64_t>
      received;                  ///< bytes of calls and replies in the last second, by rank of the sender
  std::vector<Operation> open;   ///< oldest first
  std::vector<Operation> ended;  ///< the last one of each group; `seconds` since its end
  std::vector<Call> pending, serving;
  std::vector<Pass> passes;
  std::map<char, int> threads;  ///< number by state
};

/// Whether a thread waits for a future: nothing says which ranks it waits for.
bool is_future_wait(const WorkerReport::Operation& operation);
/// Whether all ranks of a group take part in the operation. The announcement of an operation on devices is left out if
/// the worker lists the operation itself.
bool is_of_group(const WorkerReport& worker, const WorkerReport::Operation& operation);

/// Decodes a worker's answer. Unknown and missing fields are skipped; throws Error{kInvalid} for text that is not
/// such an answer.
WorkerReport decode_worker_report(std::string_view json);

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
