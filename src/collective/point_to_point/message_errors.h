#pragma once
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>

#include "collective/point_to_point/message_queue.h"
#include "collective/point_to_point/pair_connections.h"

namespace torchspan::collective {

/// Ranks of a group that can send no more, and why, by rank.
using GoneRanks = std::vector<std::optional<Error>>;

/// The errors of send() and recv() of one rank.
class MessageErrors {
 public:
  /// `plan` must outlive this object.
  explicit MessageErrors(const PairPlan& plan) : plan_(plan) {}

  /// `operation` waited until its deadline.
  Error late(const MessageOperation& operation, const MessageQueue& queue, const GoneRanks& gone) const;
  /// What the operation waits for: the other rank and its call.
  std::string awaited(const MessageOperation& operation, const MessageQueue& queue,
                      const GoneRanks& gone) const;
  /// The message does not have the dtype and shape of the tensor.
  Error mismatch(const MessageOperation& operation, const Offered& offered) const;
  /// All ranks from which a recv() from any rank could receive are gone.
  Error no_sender(const MessageOperation& operation, const GoneRanks& gone) const;
  /// A rank sent what it may not send.
  Error invalid(int rank, const Error& cause) const;

 private:
  std::string awaited_from_any(const MessageOperation& operation, const MessageQueue& queue,
                               const GoneRanks& gone) const;
  const std::string& name(int rank) const { return plan_.peers[static_cast<std::size_t>(rank)]; }

  const PairPlan& plan_;
};

}  // namespace torchspan::collective
