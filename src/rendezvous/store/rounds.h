#pragma once
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "rendezvous/messages/messages.h"

namespace torchspan::rendezvous {

/// "worker0 (rank 0, …), worker1 (rank 1, …)", shortened after a dozen.
std::string list_members(const std::vector<const Member*>& members);

/// "3, 5, 6", shortened after 16.
std::string list_some(const std::vector<int>& ranks);

/// The current rounds of barriers and gathers, as a table without I/O or clock: contributions in, answers
/// out. A round ends once, with the same result for all participants; a failed round is kept until every
/// participant that can still arrive got the result. When a worker is replaced, the rounds of its rank are
/// removed and counted from 0 again; a worker that contributes without knowing of the replacement gets an
/// error. For one thread at a time.
class Rounds {
 public:
  using Answer = std::function<void(int rank, const SharedBytes& message)>;
  explicit Rounds(Answer answer) : answer_(std::move(answer)) {}

  /// A worker joined: a new one, or in place of one that left or died.
  void on_join(Member member);
  void contribute(int rank, Contribute message, TimePoint now);
  /// Answers which ranks are missing in the round for which `rank` waits under its number `call`.
  void report_missing(int rank, std::uint64_t call) const;
  /// `rank` has left or died; `cause` is the reason ("worker1 (…) died: …"). Its rounds fail with the cause
  /// of the first of their ranks that left or died.
  void on_departed(int rank, std::string cause);
  /// Ends the rounds whose first deadline has passed.
  void tick(TimePoint now);
  Deadline next_deadline() const;
  std::size_t size() const { return rounds_.size(); }

 private:
  /// Rounds of different ranks, and sums and gathers, under the same tag are different rounds.
  struct Key {
    std::string tag;
    std::uint64_t round;
    bool sums;
    Ranks ranks;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Arrival {
    std::uint64_t call;
    Bytes bytes;
  };
  struct Round {
    std::vector<std::uint32_t> incarnations;  ///< of the key's ranks; they are the latest
    std::vector<std::uint64_t> counts;        ///< sums of what arrived
    std::map<int, Arrival> arrived;
    std::set<int> expected;  ///< participants that have not arrived and still may
    Deadline deadline;
    bool ended = false;
    ErrorKind kind = ErrorKind::kInvalid;  ///< of the failure
    std::string text;
    std::vector<int> missing = {};  ///< ranks that were missing at the deadline; `there` lists the others
    std::string there = {};
  };
  struct End {
    std::uint64_t number = 0;  ///< counts the ends
    std::string cause;
  };

  using Place = std::map<Key, Round>::iterator;

  Place begin(Key key, const Contribute& message);
  void arrive(const Key& key, Round& round, int rank, Contribute message, TimePoint now);
  static std::string validate(const Contribute& message);
  std::string validate_ranks(int rank, const Contribute& message) const;
  std::string news_for(const Contribute& message) const;
  std::string names_of(const std::vector<int>& ranks) const;
  std::string text_for(int rank, const Round& round) const;
  std::string waits_elsewhere(const Key& key, const Round& round) const;
  const End* first_departed(const Ranks& ranks) const;
  void fail(Round& round, ErrorKind kind, std::string text);
  void complete(Round& round, bool sums);
  /// Answers all that arrived; `make` returns the message for a call.
  template <class Make>
  void answer_all(const Round& round, Make make) const;
  void erase_ended();

  const Answer answer_;
  std::map<int, Member> members_;
  std::map<int, std::string> former_names_;  ///< of the ranks whose worker was replaced
  std::map<int, End> departed_;
  std::uint64_t ends_ = 0;
  std::map<Key, Round> rounds_;
};

}  // namespace torchspan::rendezvous
