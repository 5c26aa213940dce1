#include "rendezvous/store/rounds.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/api/saturated_time.h"
#include "rendezvous/api/environment.h"

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

std::string list_some(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 16;
  const std::size_t shown = std::min(ranks.size(), kMost);
  const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(shown);
  return fmt::format("{}{}", fmt::join(ranks.begin(), end, ", "), shown < ranks.size() ? ", …" : "");
}

namespace {

/// "[0, 1, 2]", shortened after two dozen.
std::string list_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kMost = 24;
  if (ranks.size() <= kMost) return fmt::format("{}", ranks);
  return fmt::format("[{} and {} more]", fmt::join(ranks.begin(), ranks.begin() + kMost, ", "),
                     ranks.size() - kMost);
}

}  // namespace

std::string Rounds::names_of(const std::vector<int>& ranks) const {
  std::vector<const Member*> members;
  for (const int rank : ranks) members.push_back(&members_.at(rank));
  return list_members(members);
}

std::string Rounds::validate(const Contribute& message) {
  if (!is_name(message.tag)) return "its tag is not a name: 1 to 127 of the characters A-Z a-z 0-9 _ . : -";
  if (message.bytes.size() > kMostGatherBytes) {
    return fmt::format("{} bytes are more than the {} a worker may contribute", message.bytes.size(),
                       kMostGatherBytes);
  }
  return message.counts.size() > kMostCounts
             ? fmt::format("{} counts are more than the {} a worker may contribute", message.counts.size(),
                           kMostCounts)
             : "";
}

/// In the world's size, so only for the first contribution of a round.
std::string Rounds::validate_ranks(int rank, const Contribute& message) const {
  const std::vector<int> ranks = message.ranks.list();
  if (message.ranks != ranks) return "its ranks are not in the shortest form";
  if (!std::is_sorted(ranks.begin(), ranks.end(), std::less_equal<>())) {
    return fmt::format("the ranks {} are not ascending", list_ranks(ranks));
  }
  for (const int other : ranks) {
    if (!members_.contains(other)) return fmt::format("there is no rank {} in this world", other);
  }
  if (!std::binary_search(ranks.begin(), ranks.end(), rank)) {
    return fmt::format("rank {} takes part without being one of its ranks {}", rank, list_ranks(ranks));
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
  const std::vector<int> ranks = message.ranks.list();
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Member& member = members_.at(ranks[i]);
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
    on_departed(rank, describe(former->second) + " was replaced");
    departed_.erase(rank);
    std::erase_if(rounds_, [&](const auto& entry) { return entry.first.ranks.contains(rank); });
  }
  members_[rank] = std::move(member);
}

void Rounds::contribute(int rank, Contribute message, TimePoint now) {
  const auto refuse = [&](ErrorKind kind, const std::string& text) {
    answer_(rank, share_message(RoundFailed{message.call, kind, text}));
  };
  if (const std::string problem = validate(message); !problem.empty())
    return refuse(ErrorKind::kInvalid, problem);
  const bool sums = !message.counts.empty();
  Key key{message.tag, message.round, sums, std::move(message.ranks)};
  auto place = rounds_.find(key);
  // A round exists only under ranks and incarnations that were valid and still are.
  if (place == rounds_.end() || place->second.incarnations != message.incarnations ||
      !key.ranks.contains(rank)) {
    message.ranks = std::move(key.ranks);
    if (const std::string problem = validate_ranks(rank, message); !problem.empty())
      return refuse(ErrorKind::kInvalid, problem);
    if (const std::string news = news_for(message); !news.empty())
      return refuse(ErrorKind::kDisconnected, news);
    key.ranks = std::move(message.ranks);
    place = begin(std::move(key), message);
  }
  Round& round = place->second;
  if (sums && round.counts.size() != message.counts.size()) {
    return refuse(ErrorKind::kInvalid,
                  fmt::format("{} counts where other ranks have {}: all ranks must give equally many",
                              message.counts.size(), round.counts.size()));
  }
  round.expected.erase(rank);
  if (round.ended) {
    refuse(round.kind, text_for(rank, round));
  } else {
    arrive(place->first, round, rank, std::move(message), now);
  }
  erase_ended();
}

Rounds::Place Rounds::begin(Key key, const Contribute& message) {
  const auto [place, fresh] = rounds_.try_emplace(std::move(key));
  if (!fresh) return place;
  Round& round = place->second;
  round.incarnations = message.incarnations;
  round.counts.resize(message.counts.size());
  for (const int other : place->first.ranks.list()) {
    if (!departed_.contains(other)) round.expected.insert(round.expected.end(), other);
  }
  return place;
}

void Rounds::arrive(const Key& key, Round& round, int rank, Contribute message, TimePoint now) {
  const bool again =
      !round.arrived.insert_or_assign(rank, Arrival{message.call, std::move(message.bytes)}).second;
  for (std::size_t i = 0; i < message.counts.size() && !again; ++i) round.counts[i] += message.counts[i];
  round.deadline = earlier(round.deadline, deadline_after(now, message.timeout));
  // Of a later arrival, all ranks are present: on_departed() would have ended the round.
  if (const End* departed = round.arrived.size() == 1 ? first_departed(key.ranks) : nullptr) {
    fail(round, ErrorKind::kDisconnected, departed->cause);
  } else if (round.expected.empty()) {
    complete(round, key.sums);
  }
}

const Rounds::End* Rounds::first_departed(const Ranks& ranks) const {
  const End* first = nullptr;
  for (const auto& [rank, end] : departed_) {
    if (first != nullptr && first->number < end.number) continue;
    if (ranks.contains(rank)) first = &end;
  }
  return first;
}

void Rounds::report_missing(int rank, std::uint64_t call) const {
  for (const auto& [key, round] : rounds_) {
    const auto found = round.arrived.find(rank);
    if (round.ended || found == round.arrived.end() || found->second.call != call) continue;
    answer_(rank, share_message(Missing{call, {round.expected.begin(), round.expected.end()}}));
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

/// Most ranks of one program have the same number for a call, so they share one message.
template <class Make>
void Rounds::answer_all(const Round& round, Make make) const {
  std::map<std::uint64_t, SharedBytes> by_call;
  for (const auto& [rank, arrival] : round.arrived) {
    SharedBytes& message = by_call[arrival.call];
    if (!message) message = make(arrival.call);
    answer_(rank, message);
  }
}

void Rounds::complete(Round& round, bool sums) {
  round.ended = true;
  if (sums) {
    Summed summed;
    summed.sums.counts = round.counts;
    for (auto& [rank, arrival] : round.arrived) {
      if (arrival.bytes.empty() || ++summed.sums.noted > CountSums::kMostNotes) continue;
      summed.sums.notes.push_back({rank, std::move(arrival.bytes)});
    }
    return answer_all(round, [&](std::uint64_t call) {
      summed.call = call;
      return share_message(summed);
    });
  }
  Gathered gathered;
  for (auto& [rank, arrival] : round.arrived) gathered.add(std::move(arrival.bytes));
  answer_all(round, [&](std::uint64_t call) {
    gathered.call = call;
    return share_message(gathered);
  });
}

void Rounds::fail(Round& round, ErrorKind kind, std::string text) {
  round.ended = true;
  round.kind = kind;
  round.text = std::move(text);
  answer_all(round, [&](std::uint64_t call) { return share_message(RoundFailed{call, kind, round.text}); });
  round.arrived.clear();
}

void Rounds::on_departed(int rank, std::string cause) {
  departed_.emplace(rank, End{ends_++, cause});
  for (auto& [key, round] : rounds_) {
    if (!key.ranks.contains(rank)) continue;
    round.expected.erase(rank);
    round.arrived.erase(rank);
    if (!round.ended) fail(round, ErrorKind::kDisconnected, cause);
  }
  erase_ended();
}

/// Where a rank that is missing in `round` waits instead; a round under the same tag explains most.
std::string Rounds::waits_elsewhere(const Key& key, const Round& round) const {
  std::string elsewhere;
  for (const auto& [other_key, other] : rounds_) {
    if (other.ended || &other == &round) continue;
    const auto waits = std::find_if(other.arrived.begin(), other.arrived.end(), [&](const auto& arrival) {
      return round.expected.contains(arrival.first);
    });
    if (waits == other.arrived.end()) continue;
    if (other_key.tag == key.tag) {
      return fmt::format("; but {} waits under this tag for ranks {} instead of {}: all must name the same",
                         names_of({waits->first}), list_ranks(other_key.ranks.list()),
                         list_ranks(key.ranks.list()));
    }
    elsewhere = fmt::format("; but {} waits in '{}' for ranks {}", names_of({waits->first}), other_key.tag,
                            list_ranks(other_key.ranks.list()));
  }
  return elsewhere;
}

void Rounds::tick(TimePoint now) {
  for (auto& [key, round] : rounds_) {
    if (round.ended || !round.deadline.passed(now)) continue;
    std::vector<int> there;
    for (const auto& [rank, arrival] : round.arrived) there.push_back(rank);
    round.missing.assign(round.expected.begin(), round.expected.end());
    round.there = fmt::format("there: {}{}", names_of(there), waits_elsewhere(key, round));
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
