#include "launch/supervisor/job_nodes.h"

#include <fmt/format.h>
#include <utility>

#include "launch/supervisor/prepare.h"
#include "rendezvous/api/environment.h"

namespace torchspan::launch {
namespace {

/// The ports at which the workers may listen, and so may this launcher.
std::string ports_of(const JobOptions& job) {
  if (!job.nodes.port_range.empty()) return job.nodes.port_range;
  const std::string mine = value_of(job.extra, "TORCHSPAN_PORT_RANGE");
  return mine.empty() ? value_of(job.environment, "TORCHSPAN_PORT_RANGE") : mine;
}

/// This launcher as a worker of the world of launchers.
rendezvous::WorkerEnvironment identify(const JobOptions& job) {
  Environment environment = job.environment;
  for (const auto& [name, value] : job.extra) environment[name] = value;
  std::erase_if(environment, [](const auto& entry) { return entry.first.starts_with("TORCHELASTIC_"); });
  const NodePlace& place = job.nodes;
  environment["RANK"] = std::to_string(place.node_rank);
  environment["WORLD_SIZE"] = std::to_string(place.count);
  environment["LOCAL_RANK"] = "0";
  environment["LOCAL_WORLD_SIZE"] = "1";
  environment["MASTER_ADDR"] = place.rdzv_host;
  environment["MASTER_PORT"] = std::to_string(place.rdzv_port);
  environment["TORCHSPAN_NAME"] = fmt::format("launcher{}", place.node_rank);
  environment["TORCHSPAN_RUN_ID"] = place.job_id + ".launchers";
  environment["TORCHSPAN_RESTART_COUNT"] = "0";
  return rendezvous::read_environment(environment);
}

std::string address_to_listen(const std::string& host, std::uint16_t port) {
  const bool bare = host.find(':') != std::string::npos && !host.starts_with('[');
  return bare ? fmt::format("tls:[{}]:{}", host, port) : fmt::format("tls:{}:{}", host, port);
}

/// The options that decide what follows a failure.
std::string list_options(const JobOptions& job) {
  const RestartPolicy& policy = job.restarts;
  return fmt::format(
      "--nnodes {} -n {} --max-restarts {} --restart-backoff {:g}s --max-backoff {:g}s --give-up-after {}",
      job.nodes.count, job.workers, policy.most, to_seconds(policy.backoff),
      to_seconds(policy.longest_backoff), policy.give_up_after);
}

}  // namespace

NodeMeeting make_node_meeting(Executor& executor, const JobOptions& job) {
  const rendezvous::WorkerEnvironment identity = identify(job);
  const net::Secret secret = rendezvous::load_secret(identity);
  NodeMeeting meeting;
  meeting.nodes = job.nodes.count;
  meeting.join.name = identity.name;
  meeting.join.rank = identity.rank;
  meeting.join.world_size = rendezvous::kOpenWorld;
  meeting.join.store_address = identity.store_address();
  meeting.join.job = identity.job;
  meeting.join.timeout = identity.join_timeout;
  meeting.join.host_id = identity.name;  // heartbeats between all launchers
  if (!meeting.join.store_address.starts_with("tls:")) {
    meeting.transports = rendezvous::stream_transports(executor, secret);
    return meeting;
  }
  if (identity.rank == 0 && !identity.listen_host.empty()) {
    meeting.join.store_listen = address_to_listen(identity.listen_host, identity.master_port);
  }
  net::TlsOptions tls;
  tls.certificate_file = identity.certificate_file;
  tls.key_file = identity.key_file;
  tls.authority_file = identity.authority_file;
  tls.ports = read_port_range(ports_of(job));
  meeting.transports = rendezvous::tls_transports(executor, secret, tls);
  return meeting;
}

JobNodes::JobNodes(Executor& executor, const JobOptions& job, Poller& poller)
    : node_(job.nodes.node_rank), link_(executor, job.nodes.node_rank, job.nodes.count) {
  mine_.options = list_options(job);
  NodeMeeting meeting = make_node_meeting(executor, job);
  meeting.joined = [this](const rendezvous::Membership& world) { return link_.listen(world); };
  rounds_ = std::make_unique<NodeRounds>(executor, std::move(meeting), [&poller] { poller.wake(); });
}

void JobNodes::publish() { rounds_->publish(mine_); }

std::string JobNodes::name_of(int node, const std::string& text) const {
  return fmt::format("host {}{}: {}", node, node == node_ ? " (this one)" : "", text);
}

void JobNodes::ready(int attempt, std::uint16_t store_port) {
  mine_.attempt = attempt;
  mine_.phase = NodeState::Phase::kReady;
  mine_.store_port = store_port;
  mine_.failure.reset();
  all_ready_ = all_ended_ = failure_taken_ = false;
  failure_elsewhere_.clear();
  failure_.reset();
  publish();
}

void JobNodes::read_rounds() {
  for (const NodeStates& states : rounds_->take()) note(states);
  if (!gone_) gone_ = rounds_->failure();
}

void JobNodes::note(const NodeStates& states) {
  std::vector<std::string> addresses;
  for (const NodeState& state : states) addresses.push_back(state.questions);
  link_.set_addresses(std::move(addresses));
  if (const std::string difference = describe_difference(states); !difference.empty() && !gone_)
    gone_ = Error(ErrorKind::kInvalid, difference);
  for (int node = 0; node < static_cast<int>(states.size()); ++node) {
    const NodeState& state = states[static_cast<std::size_t>(node)];
    if (node != node_ && signal_ == 0) signal_ = state.signal;
    if (node == node_ || state.attempt != mine_.attempt || !state.failure) continue;
    if (failure_elsewhere_.empty()) failure_elsewhere_ = name_of(node, state.failure->text);
  }
  if (all_reached(states, mine_.attempt, NodeState::Phase::kReady)) {
    all_ready_ = true;
    store_port_ = states[0].store_port;
  }
  if (all_ended_ || !all_reached(states, mine_.attempt, NodeState::Phase::kEnded)) return;
  all_ended_ = true;
  if (const auto node = first_failed_node(states, mine_.attempt)) {
    const NodeState::Failure& failure = *states[static_cast<std::size_t>(*node)].failure;
    failure_ = Failure{failure.result, name_of(*node, failure.text)};
  }
}

bool JobNodes::may_start() {
  read_rounds();
  if (gone_) throw Error(*gone_);
  return all_ready_;
}

void JobNodes::running() {
  mine_.phase = NodeState::Phase::kRunning;
  publish();
}

void JobNodes::fail(const AttemptResult& result, const std::string& text) {
  if (mine_.failure) return;
  mine_.failure = NodeState::Failure{result, text};
  publish();
}

void JobNodes::announce_signal(int signal) {
  mine_.signal = signal;
  signal_taken_ = true;  // this launcher handles its own
  publish();
}

int JobNodes::take_signal() {
  read_rounds();
  return signal_ != 0 && !std::exchange(signal_taken_, true) ? signal_ : 0;
}

std::string JobNodes::take_failure() {
  read_rounds();
  const std::string failure = gone_ ? gone_->message() : failure_elsewhere_;
  if (failure.empty() || std::exchange(failure_taken_, true)) return "";
  return failure;
}

void JobNodes::end() {
  mine_.phase = NodeState::Phase::kEnded;
  publish();
}

bool JobNodes::all_ended() {
  read_rounds();
  if (!all_ended_ && gone_) {
    AttemptResult result;
    result.code = 1;
    failure_ = Failure{result, gone_->message()};
  }
  return all_ended_ || gone_;
}

}  // namespace torchspan::launch
