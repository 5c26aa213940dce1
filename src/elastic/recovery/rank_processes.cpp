#include "elastic/recovery/rank_processes.h"

#include <cstddef>
#include <unistd.h>
#include <utility>

#include <torchspan/core/bytes.h>

#include "rendezvous/api/process_stat.h"

namespace torchspan::elastic {

std::uint64_t RankProcesses::meet(const collective::Group& group, std::uint64_t number) {
  const std::int64_t pid = ::getpid();
  const auto stat = rendezvous::read_process_stat(pid);
  ByteWriter mine;
  mine.put(number);
  mine.put(pid);
  mine.put(stat ? stat->start_ticks : std::uint64_t{0});
  const std::vector<Bytes> all = group.all_gather_bytes(mine.bytes());
  std::vector<Process> processes;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    ByteReader in(all[rank]);
    const auto theirs = in.get<std::uint64_t>();
    if (group.ranks()[rank] == 0) number = theirs;
    Process& process = processes.emplace_back();
    process.rank = group.ranks()[rank];
    process.pid = in.get<std::int64_t>();
    process.start_ticks = in.get<std::uint64_t>();
  }
  processes_ = std::move(processes);
  return number;
}

std::optional<RankProcesses::Process> RankProcesses::stopped() const {
  for (const Process& process : processes_) {
    const auto stat = rendezvous::read_process_stat(process.pid);
    if (stat && stat->start_ticks == process.start_ticks && stat->stopped()) return process;
  }
  return std::nullopt;
}

}  // namespace torchspan::elastic
