#include "launch/watch/group_members.h"

#include <algorithm>

#include "core/api/group_number.h"

namespace torchspan::launch {
namespace {

/// Up to this many workers, all ranges are tried.
constexpr int kMostTried = 32;

std::vector<int> every_nth(int step, int first, int end) {
  std::vector<int> ranks;
  for (int rank = first; rank < end; rank += step) ranks.push_back(rank);
  return ranks;
}

/// The ranks first, first + step, … below some end that have this number; empty if there are none.
std::vector<int> find_ranks(int number, int world) {
  if (group_number(every_nth(1, 0, world)) == number) return every_nth(1, 0, world);
  for (int step = 1; step < std::min(world, kMostTried); ++step) {
    for (int first = 0; first < world; ++first) {
      for (int end = first + 1; end <= world; end += step) {
        if (group_number(every_nth(step, first, end)) == number) return every_nth(step, first, end);
      }
    }
    if (world > kMostTried) break;
  }
  return {};
}

bool is_seen_in(const WorkerReport& worker, int number) {
  const auto of_group = [number](const WorkerReport::Operation& operation) {
    return (operation.kind == "collective" || operation.kind == "wait" || operation.kind == "message") &&
           operation.part == number;
  };
  return std::any_of(worker.open.begin(), worker.open.end(), of_group) ||
         std::any_of(worker.ended.begin(), worker.ended.end(), of_group);
}

}  // namespace

std::set<int> members_of_group(int number, const std::vector<WorkerReport>& workers) {
  std::set<int> present, members;
  int world = 0;
  for (const WorkerReport& worker : workers) {
    present.insert(worker.rank);
    world = std::max({world, worker.world, worker.rank + 1});
  }
  if (number < 0) return present;
  for (const int rank : find_ranks(number, world)) {
    if (present.contains(rank)) members.insert(rank);
  }
  if (!members.empty()) return members;
  for (const WorkerReport& worker : workers) {
    if (is_seen_in(worker, number)) members.insert(worker.rank);
  }
  return members;
}

}  // namespace torchspan::launch
