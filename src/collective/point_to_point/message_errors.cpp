#include "collective/point_to_point/message_errors.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::collective {
namespace {

/// Ranks that an error lists.
constexpr std::size_t kMostRanks = 8;

/// "worker1, worker2 and 3 more".
std::string list_some(const std::vector<std::string>& names, const char* separator) {
  const std::size_t shown = std::min(names.size(), kMostRanks);
  std::string text = fmt::format(
      "{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), separator));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

}  // namespace

Error MessageErrors::late(const MessageOperation& operation, const MessageQueue& queue,
                          const GoneRanks& gone) const {
  return {ErrorKind::kTimedOut,
          fmt::format("{} of {} waited {:.3g} s: {}", operation.call(), name(plan_.rank),
                      to_seconds(plan_.timeout), awaited(operation, queue, gone))};
}

std::string MessageErrors::awaited(const MessageOperation& operation, const MessageQueue& queue,
                                   const GoneRanks& gone) const {
  if (operation.peer == kNoPeer) return awaited_from_any(operation, queue, gone);
  const std::string& peer = name(operation.peer);
  if (operation.accepted) {
    return fmt::format("{} made the matching call, but {} of {} bytes arrived in time", peer, operation.moved,
                       operation.bytes());
  }
  std::string text = fmt::format("{} has not called {} rank {} with tag {}", peer,
                                 operation.sends ? "recv() from" : "send() to", plan_.rank, operation.tag);
  const std::string offers = queue.unmatched(operation.peer);
  if (!operation.sends && !offers.empty()) text += fmt::format("; it sends {}", offers);
  return text;
}

std::string MessageErrors::awaited_from_any(const MessageOperation& operation, const MessageQueue& queue,
                                            const GoneRanks& gone) const {
  std::vector<std::string> waited_for, others;
  for (int rank = 0; rank < static_cast<int>(plan_.ranks.size()); ++rank) {
    if (rank == plan_.rank) continue;
    if (const auto& cause = gone[static_cast<std::size_t>(rank)]) {
      others.push_back(cause->message());
      continue;
    }
    waited_for.push_back(name(rank));
    const std::string offers = queue.unmatched(rank);
    if (!offers.empty()) others.push_back(fmt::format("{} sends {}", name(rank), offers));
  }
  std::string text = fmt::format("none of {} has called send() to rank {} with tag {}",
                                 list_some(waited_for, ", "), plan_.rank, operation.tag);
  if (!others.empty()) text += "; " + list_some(others, "; ");
  return text;
}

Error MessageErrors::mismatch(const MessageOperation& operation, const Offered& offered) const {
  return {ErrorKind::kInvalid,
          fmt::format(
              "{} called send({:.200} to rank {}, tag {}), and {} called {}: receive into a tensor of the "
              "dtype and shape that is sent",
              name(offered.rank), offered.offer.text, plan_.rank, offered.offer.tag, name(plan_.rank),
              operation.call())};
}

Error MessageErrors::no_sender(const MessageOperation& operation, const GoneRanks& gone) const {
  std::vector<std::string> causes;
  for (const auto& cause : gone) {
    if (cause) causes.push_back(cause->message());
  }
  return {ErrorKind::kDisconnected, fmt::format("{} of {} waits, but no other rank can send: {}",
                                                operation.call(), name(plan_.rank), list_some(causes, "; "))};
}

Error MessageErrors::invalid(int rank, const Error& cause) const {
  return {ErrorKind::kInvalid,
          fmt::format(
              "{} sent an invalid message to the group: {}; do all ranks run the same version of TorchSpan?",
              name(rank), cause.message())};
}

}  // namespace torchspan::collective
