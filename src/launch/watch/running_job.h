#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "core/api/descriptor.h"
#include "launch/watch/host_report.h"

namespace torchspan::launch {

/// A request to a process of this host over its Unix socket, without blocking.
class LocalRequest {
 public:
  /// Connects and sends the request, which fits into the socket's buffer.
  LocalRequest(const std::string& socket_path, const std::string& path);

  /// For a poller, while it is not over().
  int descriptor() const { return socket_.get(); }
  /// Reads what is there.
  void read();
  /// Whether nothing more will be read.
  bool over() const { return over_; }
  /// The answer; empty if there is none, or not all of it.
  std::string_view body() const;
  /// The process that listens; 0 if it is unknown.
  std::int64_t process() const { return process_; }

 private:
  Descriptor socket_;
  std::string answer_;
  std::int64_t process_ = 0;
  bool over_ = false;
};

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

/// Returns the folder of a running job of this user: `job` if that is a folder, else the one whose name ends so, else
/// the only one. Throws Error{kInvalid} that lists the jobs.
std::string find_job(const std::string& job, const rendezvous::Environment& environment);

/// What the names of jobs' folders begin with.
inline constexpr std::string_view kJobPrefix = "torchspan.";
/// Whether a folder with this name may be that of a job.
bool is_job_name(const std::string& name);

/// The process id of the launcher that runs the job in `folder`, as in /proc; empty if none runs it, or the system does not
/// tell.
std::string launcher_of(const std::string& folder);

/// Asks all workers of a job on this host for their state, by rank; those that do not answer within `timeout`, or before
/// `stopping` becomes true, are marked. Throws Error{kInvalid} if there is no worker that can be asked.
std::vector<WorkerReport> ask_workers(Executor& executor, const std::string& folder, Duration timeout,
                                      const std::atomic<bool>* stopping = nullptr);

/// The path of the socket at which the launcher of a job on several hosts answers; `folder`: the job's.
std::string launcher_socket(const std::string& folder);

/// The workers of all hosts of a job, by rank.
struct JobState {
  std::vector<WorkerReport> workers;
  std::string note;  ///< why workers of other hosts are missing; empty: none are
};

/// Asks the workers of this host, and the launcher of this host for those of the other hosts. Throws Error{kInvalid} if
/// neither can be asked.
JobState ask_job(Executor& executor, const std::string& folder, Duration timeout);

/// A running job of this host, whose folder changes with each restart. For one thread at a time.
class RunningJob {
 public:
  /// `folder`: that of the attempt that runs now; may be relative to the current folder.
  RunningJob(Executor& executor, const std::string& folder);

  /// An absolute path.
  const std::string& folder() const { return folder_; }
  /// Finds the folder of the attempt that runs now; between two attempts, folder() stays as it is. Returns false if the
  /// launcher has ended or is unknown.
  bool follow();

 private:
  bool has_ended() const;

  Executor& executor_;
  std::string folder_;
  const std::string launcher_;  ///< process id; empty: unknown
  Descriptor process_;          ///< readable when it has ended
};

}  // namespace torchspan::launch
