#include "launch/supervisor/node_rounds.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "core/api/json_fields.h"
#include "core/api/throw_invalid.h"
#include "launch/display/lines.h"
#include "launch/supervisor/endings.h"

namespace torchspan::launch {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostText = 2000;  // bytes; an escaped one takes up to six

std::string cut(const std::string& text) {
  if (text.size() <= kMostText) return text;
  std::size_t end = kMostText;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;  // a character of UTF-8
  return text.substr(0, end) + " …";
}

/// Without control characters: other hosts send these texts, and this one prints them.
std::string require_text(JsonFields& fields, const char* name) {
  return without_controls(fields.require<std::string>(name));
}

constexpr int kMostNumber = std::numeric_limits<int>::max();

std::optional<NodeState::Failure> decode_failure(const Json& object) {
  JsonFields fields(object);
  NodeState::Failure failure;
  failure.text = require_text(fields, "text");
  failure.result.workers = fields.require("workers", 0, kMostNumber);
  failure.result.started = fields.require("started", 0, kMostNumber);
  failure.result.ran = Duration(fields.require<std::int64_t>("ran", 0, Duration::max().count()));
  failure.result.code = fields.require("code", 0, kMostNumber);
  failure.result.signal = fields.require("signal", 0, kMostNumber);
  return fields.good() ? std::optional(std::move(failure)) : std::nullopt;
}

}  // namespace

Bytes encode_node_state(const NodeState& state) {
  Json object = {{"attempt", state.attempt},       {"phase", static_cast<int>(state.phase)},
                 {"store_port", state.store_port}, {"signal", state.signal},
                 {"options", cut(state.options)},  {"questions", cut(state.questions)}};
  if (state.failure) {
    const AttemptResult& result = state.failure->result;
    object["failure"] = {
        {"text", cut(state.failure->text)}, {"workers", result.workers}, {"started", result.started},
        {"ran", result.ran.count()},        {"code", result.code},       {"signal", result.signal}};
  }
  const std::string text = object.dump(-1, ' ', false, Json::error_handler_t::replace);
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::optional<NodeState> decode_node_state(BytesView bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const Json object = Json::parse(text, nullptr, false);
  JsonFields fields(object);
  NodeState state;
  state.attempt = fields.require("attempt", 0, kMostNumber);
  state.phase = static_cast<NodeState::Phase>(fields.require("phase", 0, 2));
  state.store_port = fields.require<std::uint16_t>("store_port");
  state.signal = fields.require("signal", 0, kMostNumber);
  state.options = require_text(fields, "options");
  if (object.contains("questions"))
    state.questions = require_text(fields, "questions");  // later than the others
  if (!fields.good()) return std::nullopt;
  if (const auto failure = object.find("failure"); failure != object.end()) {
    state.failure = decode_failure(*failure);
    if (!state.failure) return std::nullopt;
  }
  return state;
}

bool all_reached(const NodeStates& states, int attempt, NodeState::Phase phase) {
  for (const NodeState& state : states) {
    if (state.attempt != attempt || state.phase < phase) return false;
  }
  return true;
}

std::optional<int> first_failed_node(const NodeStates& states, int attempt) {
  std::optional<int> first;
  const auto order = [&](int node) {
    const AttemptResult& result = states[static_cast<std::size_t>(node)].failure->result;
    return std::tuple(!is_crash(result.signal), result.ran, node);
  };
  for (int node = 0; node < static_cast<int>(states.size()); ++node) {
    const NodeState& state = states[static_cast<std::size_t>(node)];
    if (state.attempt != attempt || !state.failure) continue;
    if (!first || order(node) < order(*first)) first = node;
  }
  return first;
}

std::string describe_difference(const NodeStates& states) {
  for (std::size_t node = 1; node < states.size(); ++node) {
    if (states[node].options == states[0].options) continue;
    return fmt::format(
        "the launchers of host 0 and host {} have different options: '{}' and '{}'; start torchspan run with "
        "the same ones on all hosts, except --node-rank",
        node, states[0].options, states[node].options);
  }
  return "";
}

namespace {

using rendezvous::Membership;

/// One attempt to reach host 0. After each, the thread sees whether it must stop.
constexpr Duration kDialTime = std::chrono::seconds(2);
/// Of the last attempt, whose error is reported: long enough for a handshake to find out that the path drops large packets.
constexpr Duration kLastDialTime = std::chrono::seconds(8);
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
    const Duration left = until.left(executor_.now());
    options.timeout = left <= kLastDialTime ? left : std::min(kDialTime, left - kLastDialTime);
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
    for (const rendezvous::Member& member : world.members()) {
      if (world.is_present(member.rank)) std::erase(missing, member.rank);
    }
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
      throw_invalid(
          "the launcher of host {} sent something else than its state: run the same version of TorchSpan on "
          "all hosts",
          states.size());
    }
    states.push_back(*state);
  }
  MutexLock lock(mutex_);
  rounds_.push_back(std::move(states));
}

}  // namespace torchspan::launch
