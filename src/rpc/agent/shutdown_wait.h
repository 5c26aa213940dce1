#pragma once
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/runtime.h>

namespace torchspan::rpc {

/// Logs what shutdown() waits for: every ten seconds, the unfinished work of this worker and of others as
/// they report it. Names workers that have not called shutdown() only after nothing was asked of this worker
/// for ten seconds, then twenty, and so on, because many programs call shutdown() to serve the others until
/// they do. One thread at a time.
class ShutdownWait {
 public:
  static constexpr Duration kEvery = std::chrono::seconds(10);
  static constexpr Duration kReportInterval = std::chrono::seconds(1);

  explicit ShutdownWait(Runtime& runtime, std::string operation = "shutdown()")
      : runtime_(runtime),
        operation_(std::move(operation)),
        began_(runtime.executor.now()),
        warned_(began_),
        logged_(began_),
        served_at_(began_),
        patience_(kEvery) {}

  /// Returns this worker's unfinished work for its report to the others; empty most of the time, because
  /// every worker may receive the report.
  std::string news(const std::string& unfinished);
  /// Records the reports of a round: the news of some of the `busy` other workers that have work left, by
  /// name. Empty news keep the work reported before.
  void heard(std::map<std::string, std::string> news, std::uint64_t busy);
  /// Logs a warning if the last one is old enough and some worker has work left.
  void warn(const std::string& unfinished);
  /// The same; calls `unfinished` only if a warning is due.
  template <class F>
  void warn_of(F&& unfinished) {
    if (is_due()) warn(unfinished());
  }
  /// Warns of the workers that have not called shutdown(). `serving`: this worker has calls in progress, its
  /// own or those of callers that wait; `handled`: how many requests it has answered so far.
  void warn_of_missing(const std::string& names, bool serving, std::uint64_t handled);
  /// Returns the work left, as in "this worker …; worker 'worker1' …"; empty if there is none.
  std::string work(const std::string& unfinished) const;

 private:
  bool is_due() const { return runtime_.executor.now() - warned_ >= kEvery; }
  void say(const std::string& what);

  Runtime& runtime_;
  const std::string operation_;
  const TimePoint began_;
  TimePoint warned_, logged_, served_at_;
  Duration patience_;
  std::uint64_t handled_ = 0;
  std::map<std::string, std::string> others_;  ///< unfinished work by worker
  std::uint64_t more_ = 0;                     ///< how many others have unfinished work, too
};

}  // namespace torchspan::rpc
