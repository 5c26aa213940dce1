#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/progress.h>

namespace torchspan::launch {

/// kStopped: ended because the launcher asked it to.
enum class WorkerState { kRunning, kDone, kFailed, kStopping, kStopped };

/// "0-2,5": ranks as ranges; `ranks` ascending.
std::string format_ranks(const std::vector<int>& ranks);

/// Formats the state of the whole job as one line. For one thread at a time.
class Board {
 public:
  explicit Board(int workers) : states_(static_cast<std::size_t>(workers), WorkerState::kRunning) {}

  void set_report(int rank, ProgressReport report) { reports_[rank] = std::move(report); }
  void set_state(int rank, WorkerState state) { states_.at(static_cast<std::size_t>(rank)) = state; }
  bool has_reports() const { return !reports_.empty(); }
  /// Returns "epoch 2/5  step 17/469  loss 0.5120  5,120 images/s  1m03s left | running 0-2", cut to `width`
  /// characters. The numbers are those of the lowest rank that reports; a rank behind it is named.
  std::string line(std::size_t width = 1000) const;

 private:
  std::string states() const;
  std::string slowest_ranks() const;

  std::vector<WorkerState> states_;
  std::map<int, ProgressReport> reports_;
};

}  // namespace torchspan::launch
