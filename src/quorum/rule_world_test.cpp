// The simulated cluster of rule_world.h. Its tests are in rule_search_test.cpp.
#include "quorum/rule_world.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torchspan::quorum::testing {
namespace {

constexpr Duration kLateLimit = std::chrono::seconds(10);

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t value = (a ^ (b + 0x9e3779b97f4a7c15u + (a << 6))) * 0xbf58476d1ce4e5b9u;
  return value ^ (value >> 29);
}

}  // namespace

std::set<int> first_ranks(int count) {
  std::set<int> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.insert(rank);
  return ranks;
}

RuleWorld::RuleWorld(int ranks, std::uint64_t seed, std::int64_t target)
    : random_(seed),
      target_(target),
      table_(first_ranks(ranks),
             {.announce =
                  [this](int rank, const Generation& generation) {
                    if (generation.step < committed()) {
                      failure_ = fmt::format("generation {} begins after step {}, but step {} was committed",
                                             generation.number, generation.step, committed());
                    }
                    if (processes_[rank].phase == Phase::kDead) broken_.insert(generation.number);
                    messages_.push_back({.kind = Message::Kind::kAnswer,
                                         .rank = rank,
                                         .call = answered_call_[rank],
                                         .generation = generation});
                  },
              .refuse =
                  [this](int rank, const Error& error) {
                    // Rank 0 holds the state and does not end, unless it was left out before.
                    lost_ = true;
                    if (lates_ == 0) failure_ = fmt::format("rank {} was refused: {}", rank, error.message());
                  }}),
      processes_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) start(rank);
}

template <class Condition>
int RuleWorld::pick(Condition condition) {
  std::vector<int> ranks;
  for (int rank = 0; rank < static_cast<int>(processes_.size()); ++rank) {
    if (condition(rank, processes_[rank])) ranks.push_back(rank);
  }
  return ranks.empty() ? -1 : ranks[random_() % ranks.size()];
}

void RuleWorld::start(int rank) {
  const std::uint64_t call = processes_[rank].call;
  processes_[rank] = Process{};
  processes_[rank].call = call;
  processes_[rank].digest = 1 + random_() % 1000;
  send_report(rank);
}

void RuleWorld::send_report(int rank) {
  Process& process = processes_[rank];
  process.phase = Phase::kWaiting;
  Report report = process.participant.report();
  report.target = target_;
  report.late_limit = kLateLimit;
  report.too_few_limit = kLateLimit;
  messages_.push_back(
      {.kind = Message::Kind::kReport, .rank = rank, .call = ++process.call, .report = report});
}

bool RuleWorld::act(Action action) {
  const auto running = [this](int rank, const Process& process) { return can_run(rank, process); };
  const auto restartable = [this](int rank, const Process& process) {
    return process.phase == Phase::kDead && !unannounced_.contains(rank);
  };
  int rank = -1;
  switch (action) {
    case kRun:
      if ((rank = pick(running)) >= 0) run(rank);
      return rank >= 0;
    case kDeliver: {
      if (messages_.empty()) return false;
      const auto place = messages_.begin() + static_cast<std::ptrdiff_t>(random_() % messages_.size());
      const Message message = *place;
      messages_.erase(place);
      deliver(message);
      return true;
    }
    case kCrash:
      rank = pick([](int rank, const Process& process) {
        return rank != 0 && process.phase != Phase::kDead && process.phase != Phase::kDone;
      });
      if (rank < 0) return false;
      end_process(rank);
      return true;
    case kRestart:
      if ((rank = pick(restartable)) >= 0) start(rank);
      return rank >= 0;
    case kLose: {
      const auto answer = std::find_if(messages_.begin(), messages_.end(),
                                       [](const Message& one) { return one.kind == Message::Kind::kAnswer; });
      if (answer == messages_.end()) return false;
      const int receiver = answer->rank;
      messages_.erase(answer);
      if (processes_[receiver].phase == Phase::kWaiting) send_report(receiver);
      return true;
    }
    case kRepeat:
      rank = pick([](int, const Process& process) { return process.phase == Phase::kWaiting; });
      if (rank >= 0) send_report(rank);
      return rank >= 0;
    case kLate:
      if (table_.next_deadline().is_never()) return false;
      now_ = table_.next_deadline().at();
      ++lates_;
      table_.tick(now_);
      return true;
    case kUserFailure:
      rank = pick([](int rank, const Process& process) {
        return rank != 0 && process.phase == Phase::kReducing && !process.contributed;
      });
      if (rank >= 0) processes_[rank].fails = true;
      return rank >= 0;
    case kLocalAbort:
      rank = pick([this](int, const Process& process) {
        if (process.phase < Phase::kMeeting || process.phase > Phase::kVoting || !process.contributed)
          return false;
        return process.phase != Phase::kMeeting ||
               !operations_.at(process.key()).is_complete(process.generation);
      });
      if (rank >= 0) fail_operation(rank);
      return rank >= 0;
    case kActions:
      break;
  }
  return false;
}

void RuleWorld::end_process(int rank) {
  Process& process = processes_[rank];
  if (process.phase == Phase::kMeeting) operations_[process.key()].retract(rank, process.generation);
  process.phase = Phase::kDead;
  unannounced_.insert(rank);
  messages_.push_back({.kind = Message::Kind::kGone, .rank = rank});
  for (const std::uint64_t generation : {process.generation.number, table_.current().number})
    broken_.insert(generation);
}

/// Whether the generation of a rank has ended, as far as it knows. Without a group, it does not notice that another
/// member gave up, nor the death of one that was replaced: it asks rank 0.
bool RuleWorld::has_ended(int rank, const Process& process) const {
  if (process.phase != Phase::kMeeting) return broken_.contains(process.generation.number);
  const std::vector<int>& members = process.generation.ranks;
  return table_.is_over_for(rank) || std::any_of(members.begin(), members.end(), [this](int member) {
           return processes_[member].phase == Phase::kDead;
         });
}

/// Whether the rank's next operation does not wait for others.
bool RuleWorld::can_run(int rank, const Process& process) const {
  if (process.phase < Phase::kMeeting || process.phase > Phase::kVoting) return false;
  if (!process.contributed || has_ended(rank, process)) return true;
  return operations_.at(process.key()).is_complete(process.generation);
}

void RuleWorld::run(int rank) {
  Process& process = processes_[rank];
  Operation& operation = operations_[process.key()];
  if (!process.contributed) return contribute(rank, operation);
  const bool complete = operation.is_complete(process.generation);
  if (has_ended(rank, process)) {
    // A rank may have the result of a complete operation before it learns of the death, or not. A meeting completes for
    // all members, because rank 0's store answers them.
    const bool takes = complete && (process.phase == Phase::kMeeting || random_() % 2 != 0);
    if (!takes) return fail_operation(rank);
  }
  if (complete) take_result(rank, operation);
}

void RuleWorld::contribute(int rank, Operation& operation) {
  Process& process = processes_[rank];
  process.contributed = true;
  operation.values[rank] = process.digest;
  if (process.phase != Phase::kVoting) return;
  if (process.fails) {
    operation.refused = true;
  } else {
    process.participant.prepare();
  }
  if (rank == process.generation.ranks.front() && table_.is_over_for(rank)) operation.regroup = true;
}

void RuleWorld::begin_step(int rank) {
  Process& process = processes_[rank];
  if (process.participant.committed() >= target_) return send_report(rank);
  process.fails = false;
  process.begin(Phase::kReducing);
}

void RuleWorld::take_result(int rank, Operation& operation) {
  Process& process = processes_[rank];
  switch (process.phase) {
    case Phase::kMeeting:
      return process.begin(Phase::kForming);
    case Phase::kForming:
      if (process.generation.holders != process.generation.ranks) return process.begin(Phase::kCopying);
      return begin_step(rank);
    case Phase::kCopying:
      if (!process.participant.holds_state()) {
        process.digest = operation.values.at(process.generation.holders.back());
        process.participant.copied();
        check(process, rank);
      }
      return begin_step(rank);
    case Phase::kReducing:
      // The gradients depend on the ranks and on their state.
      process.gradient = process.generation.number;
      for (const auto& [other, value] : operation.values) process.gradient = mix(process.gradient, value);
      return process.begin(Phase::kVoting);
    default:
      return after_vote(rank, operation);
  }
}

void RuleWorld::after_vote(int rank, const Operation& vote) {
  Process& process = processes_[rank];
  if (vote.refused) {
    process.participant.reject();
    if (!process.fails) return send_report(rank);
    return end_process(rank);  // its program ends with the exception
  }
  process.participant.commit();
  process.digest = mix(process.digest, process.gradient);
  check(process, rank);
  vote.regroup ? send_report(rank) : begin_step(rank);
}

void RuleWorld::fail_operation(int rank) {
  Process& process = processes_[rank];
  if (process.phase == Phase::kMeeting) {
    operations_.at(process.key()).retract(rank, process.generation);
  } else {
    broken_.insert(process.generation.number);
  }
  send_report(rank);
}

void RuleWorld::deliver(Message message) {
  const int rank = message.rank;
  Process& process = processes_[rank];
  switch (message.kind) {
    case Message::Kind::kReport:
      if (process.phase == Phase::kDead && !unannounced_.contains(rank)) return;
      if (message.call < answered_call_[rank])
        return;  // an earlier call of the same process: it has failed there
      answered_call_[rank] = message.call;
      return table_.report(rank, message.report, now_);
    case Message::Kind::kAnswer:
      if (process.phase != Phase::kWaiting) return;
      if (message.call != process.call) return send_report(rank);
      return adopt(rank, message.generation);
    case Message::Kind::kGone:
      unannounced_.erase(rank);
      return table_.gone(rank, "it died", now_);
  }
}

void RuleWorld::adopt(int rank, const Generation& generation) {
  Process& process = processes_[rank];
  if (generation.complete && !std::binary_search(generation.ranks.begin(), generation.ranks.end(), rank)) {
    process.phase = Phase::kLeft;
    return;
  }
  process.generation = generation;
  process.operation = 0;
  process.contributed = false;
  process.phase = generation.complete ? Phase::kDone : Phase::kMeeting;
  if (process.participant.adopt(generation, rank) == Participant::Adoption::kApply)
    process.digest = mix(process.digest, process.gradient);
  if (process.participant.holds_state()) check(process, rank);
}

/// All ranks that ever hold the state after a step hold the same bits; the first ones are rank 0's.
void RuleWorld::check(const Process& process, int rank) {
  const auto step = static_cast<std::size_t>(process.participant.committed());
  if (history_.empty() && rank != 0)
    failure_ = fmt::format("training begins with the state of rank {}", rank);
  if (step == history_.size()) history_.push_back(process.digest);
  if (step < history_.size() && history_[step] == process.digest) return;
  failure_ = step > history_.size()
                 ? fmt::format("rank {} is at step {}, after {} steps", rank, step, history_.size() - 1)
                 : fmt::format("rank {} differs after step {} (generation {})", rank, step,
                               process.generation.number);
}

void RuleWorld::settle() {
  constexpr int kPlenty = 20000;
  for (int count = 0; count < kPlenty && failure_.empty() && !lost_; ++count) {
    const auto unfinished = [](int, const Process& process) { return process.phase < Phase::kDone; };
    if (pick(unfinished) < 0) break;
    if (act(random_() % 2 == 0 ? kRun : kDeliver) || act(kRun) || act(kDeliver)) continue;
    if (lates_ == 0) failure_ = "the ranks wait for a time limit:" + describe();
    if (!act(kLate)) failure_ = "no rank can go on:" + describe();
    if (count == kPlenty - 1) failure_ = "the ranks do not come to an end";
  }
  if (failure_.empty() && !lost_ && committed() != target_)
    failure_ = fmt::format("only {} steps were committed", committed());
}

std::string RuleWorld::describe() const {
  std::string text;
  for (std::size_t rank = 0; rank < processes_.size(); ++rank) {
    const Process& process = processes_[rank];
    text += fmt::format(" [rank {}: phase {}, generation {}, operation {}{}, {} steps]", rank,
                        static_cast<int>(process.phase), process.generation.number, process.operation,
                        process.contributed ? " contributed" : "", process.participant.committed());
  }
  return text + fmt::format(" table: generation {} of {}", table_.current().number,
                            fmt::join(table_.current().ranks, ","));
}

}  // namespace torchspan::quorum::testing
