#include "launch/watch/message_waits.h"

#include <algorithm>
#include <fmt/format.h>
#include <set>

#include "launch/watch/group_members.h"

namespace torchspan::launch {
namespace {

/// Ranks that a text lists.
constexpr int kMostAwaited = 8;

const WorkerReport::Operation* oldest_message(const WorkerReport& worker, double least_seconds) {
  const WorkerReport::Operation* oldest = nullptr;
  for (const WorkerReport::Operation& operation : worker.open) {
    if (operation.kind != "message" || operation.seconds < least_seconds) continue;
    if (oldest == nullptr || operation.seconds > oldest->seconds) oldest = &operation;
  }
  return oldest;
}

}  // namespace

std::vector<std::string> find_message_waits(const std::vector<WorkerReport>& workers, double least_seconds,
                                            const DescribeOccupation& occupation) {
  std::vector<std::string> texts;
  for (const WorkerReport& worker : workers) {
    const WorkerReport::Operation* message = oldest_message(worker, least_seconds);
    if (message == nullptr) continue;
    std::string text =
        fmt::format("rank {} has waited in '{}' for {:.1f} s", worker.rank, message->name, message->seconds);
    const std::set<int> members =
        message->peer >= 0 ? std::set<int>{message->peer} : members_of_group(message->part, workers);
    int listed = 0;
    for (const WorkerReport& other : workers) {
      if (other.rank == worker.rank || !members.contains(other.rank) || ++listed > kMostAwaited) continue;
      text += fmt::format("; rank {}: {}", other.rank, occupation(other));
    }
    if (listed > kMostAwaited) text += fmt::format("; and {} more ranks", listed - kMostAwaited);
    texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace torchspan::launch
