#include "rendezvous/store/rounds.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "rendezvous/messages/names.h"

namespace torchspan::rendezvous {

std::string list_members(const std::vector<const Member*>& members) {
  constexpr std::size_t kMost = 12;
  std::string text;
  for (std::size_t i = 0; i < std::min(members.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + describe(*members[i]);
  }
  if (members.size() > kMost) text += fmt::format(" and {} more", members.size() - kMost);
  return text.empty() ? "none" : text;
}

std::string Rounds::names_of(const std::vector<int>& ranks) const {
  std::vector<const Member*> members;
  for (const int rank : ranks) members.push_back(&members_.at(rank));
  return list_members(members);
}

std::string Rounds::validate(int rank, const Contribute& message) const {
  const auto& ranks = message.ranks;
  if (!is_name(message.tag)) return "its tag is not a name: 1 to 127 of the characters A-Z a-z 0-9 _ . : -";
  if (message.bytes.size() > kMostGatherBytes) {
    return fmt::format("{} bytes are more than the {} a worker may contribute", message.bytes.size(),
                       kMostGatherBytes);
  }
  if (!std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>())) {
    return fmt::format("the ranks {} are not ascending", ranks);
  }
  for (const int other : ranks) {
    if (!members_.contains(other)) return fmt::format("there is no rank {} in this world", other);
  }
  if (!std::binary_search(ranks.begin(), ranks.end(), rank)) {
    return fmt::format("rank {} takes part without being one of its ranks {}", rank, ranks);
  }
  if (message.incarnations.size() != ranks.size()) {
    return fmt::format("it names {} incarnations of {} ranks", message.incarnations.size(), ranks.size());
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::uint32_t latest = members_.at(ranks[i]).incarnation;
    if (message.incarnations[i] > latest || (ranks[i] == rank && message.incarnations[i] != latest)) {
      return fmt::format("incarnation {} of rank {} is not known here", message.incarnations[i], ranks[i]);
    }
  }
  return "";
}

std::string Rounds::news_for(const Contribute& message) const {
  for (std::size_t i = 0; i < message.ranks.size(); ++i) {
    const Member& member = members_.at(message.ranks[i]);
    if (message.incarnations[i] == member.incarnation) continue;
    return fmt::format("{} was replaced meanwhile; call again (its place is taken by {})",
                       former_names_.at(member.rank), describe(member));
  }
  return "";
}

void Rounds::on_join(Member member) {
  const int rank = member.rank;
  if (const auto former = members_.find(rank); former != members_.end()) {
    former_names_[rank] = former->second.name;
    on_gone(rank, describe(former->second) + " was replaced");
    gone_.erase(rank);
    std::erase_if(rounds_, [&](const auto& entry) {
      return std::binary_search(entry.first.ranks.begin(), entry.first.ranks.end(), rank);
    });
  }
  members_[rank] = std::move(member);
}

void Rounds::contribute(int rank, Contribute message, TimePoint now) {
  if (const std::string problem = validate(rank, message); !problem.empty()) {
    answer_(rank, encode_message(RoundFailed{message.call, ErrorKind::kInvalid, problem}));
    return;
  }
  if (const std::string news = news_for(message); !news.empty()) {
    answer_(rank, encode_message(RoundFailed{message.call, ErrorKind::kDisconnected, news}));
    return;
  }
  const auto [place, fresh] = rounds_.try_emplace(Key{message.tag, message.ranks, message.round});
  Round& round = place->second;
  if (fresh) {
    for (const int other : message.ranks) {
      if (!gone_.contains(other)) round.expected.insert(other);
    }
  }
  round.expected.erase(rank);
  if (round.ended) {
    answer_(rank, encode_message(RoundFailed{message.call, round.kind, text_for(rank, round)}));
  } else {
    round.arrived[rank] = {message.call, std::move(message.bytes)};
    round.deadline = earlier(round.deadline, deadline_after(now, message.timeout));
    if (const End* gone = first_gone(message.ranks)) {
      fail(round, ErrorKind::kDisconnected, gone->cause);
    } else if (round.expected.empty()) {
      complete(round);
    }
  }
  erase_ended();
}

const Rounds::End* Rounds::first_gone(const std::vector<int>& ranks) const {
  const End* first = nullptr;
  for (const int rank : ranks) {
    const auto gone = gone_.find(rank);
    if (gone == gone_.end() || (first != nullptr && first->number < gone->second.number)) continue;
    first = &gone->second;
  }
  return first;
}

void Rounds::report_missing(int rank, std::uint64_t call) const {
  for (const auto& [key, round] : rounds_) {
    const auto found = round.arrived.find(rank);
    if (round.ended || found == round.arrived.end() || found->second.call != call) continue;
    answer_(rank, encode_message(Missing{call, {round.expected.begin(), round.expected.end()}}));
  }
}

/// The text for a rank that was missing itself says "this worker" for it.
std::string Rounds::text_for(int rank, const Round& round) const {
  if (!std::binary_search(round.missing.begin(), round.missing.end(), rank)) return round.text;
  std::vector<int> others = round.missing;
  std::erase(others, rank);
  return fmt::format("the deadline passed without this worker, {}{}{}; {}", describe(members_.at(rank)),
                     others.empty() ? "" : ", and without ", others.empty() ? "" : names_of(others),
                     round.there);
}

void Rounds::complete(Round& round) {
  Gathered gathered;
  for (auto& [rank, arrival] : round.arrived) gathered.bytes.push_back(std::move(arrival.bytes));
  for (const auto& [rank, arrival] : round.arrived) {
    gathered.call = arrival.call;
    answer_(rank, encode_message(gathered));
  }
  round.ended = true;
}

void Rounds::fail(Round& round, ErrorKind kind, std::string text) {
  round.ended = true;
  round.kind = kind;
  round.text = std::move(text);
  for (const auto& [rank, arrival] : round.arrived) {
    answer_(rank, encode_message(RoundFailed{arrival.call, kind, round.text}));
  }
  round.arrived.clear();
}

void Rounds::on_gone(int rank, std::string cause) {
  gone_.emplace(rank, End{ends_++, cause});
  for (auto& [key, round] : rounds_) {
    if (!std::binary_search(key.ranks.begin(), key.ranks.end(), rank)) continue;
    round.expected.erase(rank);
    round.arrived.erase(rank);
    if (!round.ended) fail(round, ErrorKind::kDisconnected, cause);
  }
  erase_ended();
}

std::string Rounds::others_under_this_tag(const Key& key, const Round& round) const {
  for (const auto& [other_key, other] : rounds_) {
    if (other_key.tag != key.tag || other.ended || &other == &round) continue;
    for (const auto& [rank, arrival] : other.arrived) {
      if (!round.expected.contains(rank)) continue;
      return fmt::format("; but {} waits under this tag for ranks {} instead of {}: all must name the same",
                         names_of({rank}), other_key.ranks, key.ranks);
    }
  }
  return "";
}

void Rounds::tick(TimePoint now) {
  for (auto& [key, round] : rounds_) {
    if (round.ended || !round.deadline.passed(now)) continue;
    std::vector<int> there;
    for (const auto& [rank, arrival] : round.arrived) there.push_back(rank);
    round.missing.assign(round.expected.begin(), round.expected.end());
    round.there = fmt::format("there: {}{}", names_of(there), others_under_this_tag(key, round));
    fail(round, ErrorKind::kTimedOut,
         fmt::format("the deadline passed without {}; {}", names_of(round.missing), round.there));
  }
  erase_ended();
}

Deadline Rounds::next_deadline() const {
  Deadline next;
  for (const auto& [key, round] : rounds_) {
    if (!round.ended) next = earlier(next, round.deadline);
  }
  return next;
}

void Rounds::erase_ended() {
  std::erase_if(rounds_,
                [](const auto& entry) { return entry.second.ended && entry.second.expected.empty(); });
}

}  // namespace torchspan::rendezvous
