#include "launch/supervisor/node_rounds.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>
#include <utility>
#include <vector>

#include "launch/display/lines.h"

namespace torchspan::launch {
namespace {

using rendezvous::Membership;

/// One attempt to reach host 0. After each, the thread sees whether it must stop.
constexpr Duration kDialTime = std::chrono::seconds(2);
constexpr Duration kBetweenLooks = std::chrono::milliseconds(100);
/// Of a round. A launcher that does not answer is dead much earlier.
constexpr Duration kRoundLimit = std::chrono::seconds(30);
constexpr Duration kLeaveLimit = std::chrono::seconds(2);

Error left_before_all_met() {
  return {ErrorKind::kCancelled, "this launcher ended before the launchers of all hosts had connected"};
}

}  // namespace

NodeRounds::NodeRounds(Executor& executor, NodeMeeting meeting, std::function<void()> changed)
    : executor_(executor),
      runtime_(executor, meeting.join.name, LogLevel::kWarning),
      meeting_(std::move(meeting)),
      changed_(std::move(changed)),
      parker_(executor.make_parker()) {
  thread_ = executor.spawn("torchspan.nodes", [this] { run(); });
}

NodeRounds::~NodeRounds() {
  stopping_ = true;
  parker_->unpark();
  thread_.join();
}

void NodeRounds::publish(const NodeState& state) {
  {
    MutexLock lock(mutex_);
    mine_ = state;
    unsent_ = true;
  }
  parker_->unpark();
}

std::deque<NodeStates> NodeRounds::take() {
  MutexLock lock(mutex_);
  return std::exchange(rounds_, {});
}

std::optional<Error> NodeRounds::failure() {
  MutexLock lock(mutex_);
  return failure_;
}

void NodeRounds::run() {
  try {
    take_part();
  } catch (const Error& error) {
    {
      MutexLock lock(mutex_);
      failure_ = Error(error.kind(), without_controls(error.message()));  // host 0 may have sent it
    }
    changed_();
  }
}

void NodeRounds::take_part() {
  const Deadline until = executor_.deadline_in(meeting_.join.timeout);
  const std::unique_ptr<Membership> world = join(until);
  await_all(*world, until);
  runtime_.log.set_level(LogLevel::kOff);  // the launcher reports what ends the rounds
  if (meeting_.joined) questions_ = meeting_.joined(*world);
  while (auto mine = next_state()) {
    const Deadline next = executor_.deadline_in(meeting_.every);
    mine->questions = questions_;
    exchange(*world, *mine);
    changed_();
    while (!stopping_ && !next.passed(executor_.now())) parker_->park(next);
  }
  world->leave(executor_.deadline_in(kLeaveLimit));
}

/// Returns the state for the next round; nullopt to stop, after the last state has been sent.
std::optional<NodeState> NodeRounds::next_state() {
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (stopping_ && !unsent_) return std::nullopt;
      unsent_ = false;
      if (mine_) return mine_;
    }
    parker_->park(Deadline::never());
  }
}

/// Tries for as long as the others wait, because they may start earlier than host 0.
std::unique_ptr<Membership> NodeRounds::join(Deadline until) {
  for (;;) {
    rendezvous::MembershipOptions options = meeting_.join;
    options.timeout = std::min(kDialTime, until.left(executor_.now()));
    try {
      return Membership::join(runtime_, meeting_.transports, std::move(options));
    } catch (const Error& error) {
      if (stopping_) throw left_before_all_met();
      if (meeting_.join.rank == 0 && error.kind() != ErrorKind::kTimedOut) {
        throw Error(error.kind(),
                    fmt::format("--node-rank 0 is for the host whose address --rdzv names, and its "
                                "launcher listens there: {}",
                                error.message()));
      }
      if (error.kind() != ErrorKind::kTimedOut) throw;
      if (!until.passed(executor_.now())) continue;
      throw Error(
          ErrorKind::kTimedOut,
          fmt::format("the launcher of host 0 did not answer at {} within {:g} s: start torchspan run "
                      "there with --node-rank 0 and otherwise the same options, and check that this "
                      "host can reach the address; the last attempt: {}",
                      meeting_.join.store_address, to_seconds(meeting_.join.timeout), error.message()));
    }
  }
}

void NodeRounds::await_all(const Membership& world, Deadline until) {
  for (;;) {
    std::vector<int> missing(static_cast<std::size_t>(meeting_.nodes));
    std::iota(missing.begin(), missing.end(), 0);
    for (const rendezvous::Member& member : world.members()) std::erase(missing, member.rank);
    if (missing.empty()) return;
    if (stopping_) throw left_before_all_met();
    if (until.passed(executor_.now())) {
      throw Error(
          ErrorKind::kTimedOut,
          fmt::format("the launchers of these hosts did not join within {:g} s: {}; start torchspan "
                      "run there with these as --node-rank and otherwise the same options; if one has "
                      "ended there, its output says why",
                      to_seconds(meeting_.join.timeout), fmt::join(missing, ", ")));
    }
    parker_->park(earlier(until, executor_.deadline_in(kBetweenLooks)));
  }
}

void NodeRounds::exchange(Membership& world, const NodeState& mine) {
  std::vector<int> nodes(static_cast<std::size_t>(meeting_.nodes));
  std::iota(nodes.begin(), nodes.end(), 0);
  NodeStates states;
  for (const Bytes& bytes : world.all_gather_bytes("state", encode_node_state(mine), std::move(nodes),
                                                   executor_.deadline_in(kRoundLimit))) {
    const auto state = decode_node_state(bytes);
    if (!state) {
      throw Error(ErrorKind::kInvalid,
                  fmt::format("the launcher of host {} sent something else than its state: run the same "
                              "version of TorchSpan on all hosts",
                              states.size()));
    }
    states.push_back(*state);
  }
  MutexLock lock(mutex_);
  rounds_.push_back(std::move(states));
}

}  // namespace torchspan::launch
