#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// Numbers a worker's rounds: the nth of the same ranks under the same tag is n-1, and counting restarts when
/// one of the ranks has a new holder. Each set of ranks is stored once, and each tag that is used more than once. For one
/// thread at a time.
class RoundNumbers {
 public:
  /// How many tags are counted.
  std::size_t size() const {
    std::size_t tags = 0;
    for (const auto& [ranks, numbers] : numbers_) tags += numbers.gathers.size() + numbers.sums.size();
    return tags;
  }
  /// Another process holds a rank.
  void replaced() { ++holders_; }
  /// Sets the round's number and the incarnations, which `incarnation_of(rank)` returns.
  template <class Incarnation>
  void number(Contribute& message, Incarnation incarnation_of) {
    Numbers& numbers = numbers_[message.ranks];
    if (numbers.holders != holders_) {
      std::vector<std::uint32_t> latest;
      for (const int rank : message.ranks.list()) latest.push_back(incarnation_of(rank));
      if (latest != numbers.incarnations) numbers = {std::move(latest), {}, {}};
      numbers.holders = holders_;
    }
    message.incarnations = numbers.incarnations;
    if (message.once) return;
    message.round = (message.counts.empty() ? numbers.gathers : numbers.sums)[message.tag]++;
  }

 private:
  struct Numbers {
    std::vector<std::uint32_t> incarnations;
    std::map<std::string, std::uint64_t> gathers, sums;  ///< by tag: the next round's number
    std::uint64_t holders = 0;                           ///< holders_ when the incarnations were looked up
  };
  std::uint64_t holders_ = 1;
  std::map<Ranks, Numbers> numbers_;
};

}  // namespace torchspan::rendezvous
