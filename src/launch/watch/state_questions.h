#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torchspan/detail/core/executor.h>

#include "launch/watch/local_request.h"
#include "launch/watch/worker_report.h"

namespace torchspan::launch {

/// The state of a process, as /proc writes it; X if there is none.
char state_of_process(std::int64_t process);

/// Asks the workers of a job for their state over their sockets, all at a time and without blocking. For one thread
/// at a time. The poller must outlive it.
class StateQuestions {
 public:
  /// Uses the tokens of the poller from `first_token` on, one for each rank.
  StateQuestions(Poller& poller, std::uint64_t first_token) : poller_(poller), first_token_(first_token) {}
  ~StateQuestions();
  StateQuestions(const StateQuestions&) = delete;

  /// Asks the workers whose sockets are in `folder` or below it for `path`: "/state", or "/activity" for less. A worker
  /// that still owes an answer is not asked again: a stopped process accepts a limited number of connections. Returns
  /// the number of workers.
  std::size_t ask(const std::string& folder, const std::string& path);
  /// Handles an event of the poller with one of the tokens.
  void handle(const Poller::Event& event);
  /// Whether an answer is outstanding.
  bool waiting() const;
  /// Returns the answers by rank, and marks the workers that have not answered.
  std::vector<WorkerReport> reports() const;

 private:
  struct Question {
    LocalRequest request;
    bool asked = false;  ///< by the last ask()
  };

  static WorkerReport report_of(int rank, const Question& question);

  Poller& poller_;
  const std::uint64_t first_token_;
  std::map<int, Question> questions_;  ///< by rank
};

}  // namespace torchspan::launch
