#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "rendezvous/messages.h"

namespace torchspan::rendezvous {

/// "worker0 (rank 0, …), worker1 (rank 1, …)", shortened after a dozen.
std::string list_members(const std::vector<const Member*>& members);

/// The rounds of barriers and gathers that are under way, as a table without I/O or clock: contributions in,
/// answers out. A round ends once, in the same way for all its participants; one that failed is remembered
/// until every participant that can still come was told. When a gone worker's place is taken, the rounds of
/// its rank are forgotten and counted anew: who comes without knowing of that is told. One thread at a time.
class Rounds {
 public:
  using Answer = std::function<void(int rank, Bytes message)>;
  explicit Rounds(Answer answer) : answer_(std::move(answer)) {}

  /// A worker is in: a new one, or in the place of one that is gone.
  void on_join(Member member);
  void contribute(int rank, Contribute message, TimePoint now);
  /// Answers who has not come to the round that `rank` waits for under its number `call`.
  void tell_missing(int rank, std::uint64_t call) const;
  /// `rank` will not come any more; `story` tells why ("worker1 (…) died: …"). Rounds fail by the story of
  /// the first of their ranks that went.
  void on_gone(int rank, std::string story);
  /// Ends the rounds whose first deadline has passed.
  void tick(TimePoint now);
  Deadline next_deadline() const;
  std::size_t size() const { return rounds_.size(); }

 private:
  /// Rounds of other ranks under the same tag are other rounds.
  struct Key {
    std::string tag;
    std::vector<int> ranks;
    std::uint64_t round;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Arrival {
    std::uint64_t call;
    Bytes bytes;
  };
  struct Round {
    std::map<int, Arrival> arrived;
    std::set<int> expected;  ///< participants that have not come and still may
    Deadline deadline;
    bool ended = false;
    ErrorKind kind = ErrorKind::kInvalid;  ///< of the failure
    std::string text;
    std::vector<int> missing = {};  ///< at its deadline, as is
    std::string there = {};
  };
  struct End {
    std::uint64_t number = 0;  ///< in the order of their ends
    std::string story;
  };

  std::string complaint_about(int rank, const Contribute& message) const;
  std::string news_for(const Contribute& message) const;
  std::string names_of(const std::vector<int>& ranks) const;
  std::string text_for(int rank, const Round& round) const;
  std::string others_under_this_tag(const Key& key, const Round& round) const;
  const End* first_gone(const std::vector<int>& ranks) const;
  void fail(Round& round, ErrorKind kind, std::string text);
  void complete(Round& round);
  void erase_ended();

  const Answer answer_;
  std::map<int, Member> members_;
  std::map<int, std::string> former_names_;  ///< of the ranks whose place was taken
  std::map<int, End> gone_;
  std::uint64_t ends_ = 0;
  std::map<Key, Round> rounds_;
};

}  // namespace torchspan::rendezvous
