#include "rendezvous/rounds.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "rendezvous/names.h"

namespace torchspan::rendezvous {

std::string list_members(const std::vector<const Member*>& members) {
  constexpr std::size_t kMost = 12;
  std::string text;
  for (std::size_t i = 0; i < std::min(members.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + describe(*members[i]);
  }
  if (members.size() > kMost) text += fmt::format(" and {} more", members.size() - kMost);
  return text.empty() ? "nobody" : text;
}

std::string Rounds::names_of(const std::vector<int>& ranks) const {
  std::vector<const Member*> members;
  for (const int rank : ranks) members.push_back(&members_.at(static_cast<std::size_t>(rank)));
  return list_members(members);
}

std::string Rounds::complaint_about(int rank, const Contribute& message) const {
  const auto& ranks = message.ranks;
  if (!is_name(message.tag)) return "its tag is no name: 1 to 127 of the characters A-Z a-z 0-9 _ . : -";
  if (message.bytes.size() > kMostGatherBytes) {
    return fmt::format("{} bytes are more than the {} a worker may contribute", message.bytes.size(),
                       kMostGatherBytes);
  }
  if (!std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>())) {
    return fmt::format("the ranks {} are not ascending", ranks);
  }
  if (!ranks.empty() && ranks.back() >= static_cast<int>(members_.size())) {
    return fmt::format("there is no rank {} in a world of {}", ranks.back(), members_.size());
  }
  if (!std::binary_search(ranks.begin(), ranks.end(), rank)) {
    return fmt::format("rank {} takes part without being one of its ranks {}", rank, ranks);
  }
  return "";
}

void Rounds::contribute(int rank, Contribute message, TimePoint now) {
  const Key key(message.tag, message.round);
  if (const std::string complaint = complaint_about(rank, message); !complaint.empty()) {
    answer_(rank, encode_message(RoundFailed{key.first, key.second, ErrorKind::kInvalid, complaint}));
    return;
  }
  const auto [place, fresh] = rounds_.try_emplace(key);
  Round& round = place->second;
  if (fresh) {
    round.ranks = message.ranks;
    for (const int other : message.ranks) {
      if (!gone_.contains(other)) round.expected.insert(other);
    }
  }
  round.expected.erase(rank);
  if (round.failed) {
    answer_(rank, encode_message(RoundFailed{key.first, key.second, round.kind, round.text}));
  } else {
    round.arrived[rank] = std::move(message.bytes);
    round.deadline = earlier(round.deadline, deadline_after(now, message.timeout));
    const auto gone = std::find_if(round.ranks.begin(), round.ranks.end(),
                                   [&](int other) { return gone_.contains(other); });
    if (message.ranks != round.ranks) {
      const int first =
          round.arrived.begin()->first == rank ? round.arrived.rbegin()->first : round.arrived.begin()->first;
      fail(key, round, ErrorKind::kInvalid,
           fmt::format("its callers disagree about who takes part: {} says ranks {}, {} says {}",
                       names_of({first}), round.ranks, names_of({rank}), message.ranks));
    } else if (gone != round.ranks.end()) {
      fail(key, round, ErrorKind::kDisconnected, gone_.at(*gone));
    } else if (round.arrived.size() == round.ranks.size()) {
      complete(key, round);
    }
  }
  erase_finished();
}

void Rounds::complete(const Key& key, Round& round) {
  Gathered gathered{key.first, key.second, {}};
  for (auto& [rank, bytes] : round.arrived) gathered.bytes.push_back(std::move(bytes));
  const Bytes message = encode_message(gathered);
  for (const int rank : round.ranks) answer_(rank, message);
  round.failed = true;  // nobody is expected any more, so that it is erased
}

void Rounds::fail(const Key& key, Round& round, ErrorKind kind, std::string text) {
  round.failed = true;
  round.kind = kind;
  round.text = std::move(text);
  const Bytes message = encode_message(RoundFailed{key.first, key.second, kind, round.text});
  for (const auto& [rank, bytes] : round.arrived) answer_(rank, message);
  round.arrived.clear();
}

void Rounds::on_gone(int rank, std::string story) {
  gone_.emplace(rank, story);
  for (auto& [key, round] : rounds_) {
    if (!std::binary_search(round.ranks.begin(), round.ranks.end(), rank)) continue;
    round.expected.erase(rank);
    round.arrived.erase(rank);
    if (!round.failed) fail(key, round, ErrorKind::kDisconnected, story);
  }
  erase_finished();
}

void Rounds::tick(TimePoint now) {
  for (auto& [key, round] : rounds_) {
    if (round.failed || !round.deadline.passed(now)) continue;
    std::vector<int> there;
    for (const auto& [rank, bytes] : round.arrived) there.push_back(rank);
    fail(key, round, ErrorKind::kTimedOut,
         fmt::format("the deadline passed without {}; there: {}",
                     names_of({round.expected.begin(), round.expected.end()}), names_of(there)));
  }
  erase_finished();
}

Deadline Rounds::next_deadline() const {
  Deadline next;
  for (const auto& [key, round] : rounds_) {
    if (!round.failed) next = earlier(next, round.deadline);
  }
  return next;
}

void Rounds::erase_finished() {
  std::erase_if(rounds_,
                [](const auto& entry) { return entry.second.failed && entry.second.expected.empty(); });
}

}  // namespace torchspan::rendezvous
