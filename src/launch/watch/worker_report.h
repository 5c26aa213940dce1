#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

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

}  // namespace torchspan::launch
