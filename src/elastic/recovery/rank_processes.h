#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <torchspan/collective/group.h>

namespace torchspan::elastic {

/// The processes of all ranks when a try to train began. Used by one thread.
class RankProcesses {
 public:
  struct Process {
    int rank = 0;
    std::int64_t pid = 0;
    std::uint64_t start_ticks = 0;  ///< tells it from a later process with this id
  };

  /// Exchanges the processes of all ranks. Returns `number` of rank 0. Collective.
  std::uint64_t meet(const collective::Group& group, std::uint64_t number);
  /// One that a signal or a debugger has stopped. Finds only processes of this host: those of other hosts die when they
  /// are silent.
  std::optional<Process> stopped() const;

 private:
  std::vector<Process> processes_;
};

}  // namespace torchspan::elastic
