#include "launch/watch/activity.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include "launch/display/board.h"
#include "launch/watch/diagnosis.h"

namespace torchspan::launch {
namespace {

/// Below these ages, calls and operations that do not block are work in flight, not waits.
constexpr double kLeastCall = 0.05, kLeastOperation = 0.2;

std::string seconds_text(double seconds) { return fmt::format("{:.1f} s", seconds); }

bool blocks(const WorkerReport& worker, const WorkerReport::Operation& operation) {
  if (operation.kind == "wait") return is_of_group(worker, operation);
  if (operation.kind != "collective") return false;
  return operation.name == "barrier" || operation.name == "all_gather_bytes" ||
         operation.seconds >= kLeastOperation;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", format_ranks(ranks));
}

class Activities {
 public:
  explicit Activities(const std::vector<WorkerReport>& workers) : workers_(workers) {
    for (const WorkerReport& worker : workers) ranks_[worker.name] = worker.rank;
  }

  Activity of(const WorkerReport& worker) const {
    if (worker.process_state == 'T' || worker.process_state == 't') {
      return {worker.rank, Activity::Kind::kStopped,
              fmt::format("is stopped by a signal (pid {})", worker.process)};
    }
    if (!worker.answers) return {worker.rank, Activity::Kind::kSilent, "does not answer"};
    for (auto operation = worker.open.rbegin(); operation != worker.open.rend(); ++operation) {
      if (blocks(worker, *operation)) return in_operation(worker, *operation);
      if (operation->kind == "pipeline" && operation->name.starts_with("wait")) {
        return {worker.rank, Activity::Kind::kWaiting,
                fmt::format("{}, {}", operation->name, seconds_text(operation->seconds))};
      }
    }
    if (const WorkerReport::Call* call = oldest_call(worker)) return in_call(worker, *call);
    if (!worker.open.empty() && is_future_wait(worker.open.back())) {
      return {worker.rank, Activity::Kind::kWaiting,
              fmt::format("waits for a future, {}", seconds_text(worker.open.back().seconds))};
    }
    return at_work(worker);
  }

 private:
  static const WorkerReport::Call* oldest_call(const WorkerReport& worker) {
    const WorkerReport::Call* oldest = nullptr;
    for (const WorkerReport::Call& call : worker.pending) {
      if (call.peer == worker.name || call.seconds < kLeastCall) continue;
      if (oldest == nullptr || call.seconds > oldest->seconds) oldest = &call;
    }
    return oldest;
  }

  bool has_reached(const WorkerReport& worker, const WorkerReport::Operation& operation) const {
    return std::any_of(worker.open.begin(), worker.open.end(), [&](const WorkerReport::Operation& other) {
      return other.kind == operation.kind && other.part == operation.part && other.id >= operation.id;
    });
  }

  Activity in_operation(const WorkerReport& worker, const WorkerReport::Operation& operation) const {
    const std::set<int> members = members_of_group(operation.part, workers_);
    Activity activity{worker.rank, Activity::Kind::kWaiting};
    for (const WorkerReport& other : workers_) {
      if (members.contains(other.rank) && !has_reached(other, operation))
        activity.waits_for.push_back(other.rank);
    }
    activity.text = fmt::format(
        "{} '{}' number {}, {}",
        activity.waits_for.empty() ? "is in" : fmt::format("waits for {} in", ranks_text(activity.waits_for)),
        operation.name, operation.id, seconds_text(operation.seconds));
    return activity;
  }

  Activity in_call(const WorkerReport& worker, const WorkerReport::Call& call) const {
    Activity activity{worker.rank, Activity::Kind::kWaiting};
    const auto callee = ranks_.find(call.peer);
    if (callee != ranks_.end()) activity.waits_for.push_back(callee->second);
    activity.text =
        fmt::format("waits for {} in '{}'{}, {}",
                    callee != ranks_.end() ? fmt::format("rank {}", callee->second) : call.peer, call.name,
                    call.site.empty() ? "" : fmt::format(" at {}", call.site), seconds_text(call.seconds));
    return activity;
  }

  static Activity in_message(const WorkerReport& worker, const WorkerReport::Operation& message) {
    Activity activity{worker.rank, Activity::Kind::kWaiting,
                      fmt::format("waits in '{}', {}", message.name, seconds_text(message.seconds))};
    if (message.peer >= 0) activity.waits_for.push_back(message.peer);
    return activity;
  }

  static Activity at_work(const WorkerReport& worker) {
    Activity activity{worker.rank, Activity::Kind::kComputing, "computes"};
    if (!worker.open.empty()) {
      const WorkerReport::Operation& last = worker.open.back();
      if (last.kind == "message") return in_message(worker, last);
      activity.text = fmt::format("computes in '{}', {}", last.name, seconds_text(last.seconds));
    } else {
      for (const WorkerReport::Call& call : worker.serving) {
        if (!call.begun) continue;
        activity.text =
            fmt::format("serves '{}' for {}, {}", call.name, call.peer, seconds_text(call.seconds));
        break;
      }
    }
    return activity;
  }

  const std::vector<WorkerReport>& workers_;
  std::map<std::string, int> ranks_;  ///< by worker name
};

}  // namespace

std::vector<Activity> find_activities(const std::vector<WorkerReport>& workers) {
  const Activities activities(workers);
  std::vector<Activity> all;
  for (const WorkerReport& worker : workers) all.push_back(activities.of(worker));
  return all;
}

void WaitShares::add(const std::vector<Activity>& activities) {
  std::set<int> awaited;
  for (const Activity& activity : activities) {
    awaited.insert(activity.waits_for.begin(), activity.waits_for.end());
  }
  // The first samples count alike, later ones fade.
  const double weight = 1. / std::min(++samples_, 15);
  for (const Activity& activity : activities) {
    Shares& shares = shares_[activity.rank];
    const bool waiting = activity.kind == Activity::Kind::kWaiting;
    shares.awaited += weight * ((awaited.contains(activity.rank) ? 1. : 0.) - shares.awaited);
    shares.waiting += weight * ((waiting ? 1. : 0.) - shares.waiting);
  }
}

std::optional<double> WaitShares::straggler_share(int rank) const {
  constexpr int kLeastSamples = 4;
  constexpr double kLeastShare = 0.3;
  const auto found = shares_.find(rank);
  if (found == shares_.end() || samples_ < kLeastSamples) return std::nullopt;
  const Shares& shares = found->second;
  if (shares.awaited < kLeastShare || shares.awaited < 2 * shares.waiting) return std::nullopt;
  return shares.awaited;
}

}  // namespace torchspan::launch
