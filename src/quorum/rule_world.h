#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "quorum/api/generation.h"
#include "quorum/generations.h"

namespace torchspan::quorum::testing {

/// 0 to `count` - 1.
std::set<int> first_ranks(int count);

/// The commit rule on a simulated cluster: the participants, rank 0's table, the messages between them, and
/// collective operations that complete on some ranks only when a rank dies. Each action is one atomic step of one
/// process or one message, and an independent model checks the states after it.
class RuleWorld {
 public:
  enum Action {
    kRun,          ///< one operation of a rank: contribute, or take the result
    kDeliver,      ///< a report, an answer or the end of a process reaches its receiver
    kCrash,        ///< a rank other than 0 ends without a word
    kRestart,      ///< a process takes the place of one that ended
    kLose,         ///< a connection breaks: an answer is lost
    kRepeat,       ///< a rank that waits sends its report again
    kLate,         ///< the time for reports passes
    kUserFailure,  ///< a rank's program throws: it votes against the step and leaves
    kLocalAbort,   ///< an operation fails on one rank only, such as by a timeout
    kActions
  };

  RuleWorld(int ranks, std::uint64_t seed, std::int64_t target);

  /// Runs one random action of this kind, if one is possible.
  bool act(Action action);
  /// Runs without failures until every living rank is done. Restarts nothing.
  void settle();
  /// Whether all ranks that held the state ended, which needs a rank that was late.
  bool lost() const { return lost_; }
  /// What is wrong; empty: nothing.
  const std::string& failure() const { return failure_; }
  std::int64_t committed() const {
    return std::max(static_cast<std::int64_t>(history_.size()), std::int64_t{1}) - 1;
  }
  std::uint64_t generations() const { return table_.current().number; }

 private:
  /// kMeeting: it waits for the other members, and has no group yet.
  enum class Phase { kWaiting, kMeeting, kForming, kCopying, kReducing, kVoting, kDone, kLeft, kDead };
  struct Process {
    Participant participant{0};
    Phase phase = Phase::kDead;
    Generation generation = {};
    std::size_t operation = 0;  ///< number of the current operation of its generation
    bool contributed = false;
    bool fails = false;        ///< its program throws in this step
    std::uint64_t digest = 0;  ///< of its parameters
    std::uint64_t gradient = 0;
    std::uint64_t call = 0;  ///< of its latest report

    std::pair<std::uint64_t, std::size_t> key() const { return {generation.number, operation}; }

    void begin(Phase next) {
      phase = next;
      ++operation;
      contributed = false;
    }
  };
  /// A collective operation of one generation.
  struct Operation {
    std::map<int, std::uint64_t> values;
    bool refused = false, regroup = false;

    bool is_complete(const Generation& of) const { return values.size() == of.ranks.size(); }
    /// A meeting that a rank leaves before it is complete fails; the others meet again.
    void retract(int rank, const Generation& of) {
      if (!is_complete(of)) values.erase(rank);
    }
  };
  struct Message {
    enum class Kind { kReport, kAnswer, kGone } kind;
    int rank;
    std::uint64_t call = 0;
    Report report = {};
    Generation generation = {};
  };

  void start(int rank);
  void send_report(int rank);
  void end_process(int rank);
  bool has_ended(int rank, const Process& process) const;
  bool can_run(int rank, const Process& process) const;
  void run(int rank);
  void contribute(int rank, Operation& operation);
  void take_result(int rank, Operation& operation);
  void adopt(int rank, const Generation& generation);
  void after_vote(int rank, const Operation& vote);
  void begin_step(int rank);
  void fail_operation(int rank);
  void deliver(Message message);
  void check(const Process& process, int rank);
  std::string describe() const;
  /// A random rank with `condition`; -1: none.
  template <class Condition>
  int pick(Condition condition);

  std::mt19937_64 random_;
  const std::int64_t target_;
  TimePoint now_{};
  Generations table_;
  std::vector<Process> processes_;
  std::set<int> unannounced_;  ///< dead ranks whose end rank 0 does not know
  std::vector<Message> messages_;
  std::map<int, std::uint64_t> answered_call_;  ///< the latest report that rank 0 has handled
  std::map<std::pair<std::uint64_t, std::size_t>, Operation> operations_;
  std::set<std::uint64_t> broken_;  ///< generations of which a rank ended, or left the group
  std::vector<std::uint64_t>
      history_;  ///< digest before the first step and after each step that any rank ever committed
  int lates_ = 0;
  bool lost_ = false;
  std::string failure_;
};

}  // namespace torchspan::quorum::testing
