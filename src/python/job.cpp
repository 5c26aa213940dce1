#include "python/job.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <utility>

#include <torchspan/detail/core/runtime.h>

#include "core/api/system_files.h"
#include "core/api/throw_invalid.h"
#include "net/api/network.h"
#include "python/gil.h"
#include "rendezvous/api/environment.h"
#include "rendezvous/api/worker_network.h"

namespace torchspan::python {
namespace {

/// How many bytes of random text tell one world from another that uses the same port.
constexpr int kJobBytes = 16;

/// Equal on processes that reach each other over loopback: of one boot, in one network namespace.
std::string this_host() {
  std::error_code ignored;
  return boot_id() + " " + std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
}

std::string random_text() {
  std::string text;
  for (const std::byte byte : net::Secret::random().bytes().first(kJobBytes))
    text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

/// How long a worker tries to reach rank 0 of an open world before it looks whether that has left.
constexpr Duration kJoinAttempt = std::chrono::seconds(2);

/// How long the end of a program waits for handlers that still run.
constexpr Duration kExitTime = std::chrono::seconds(5);

/// The world size and the host of a rank.
std::string host_key(int rank) { return fmt::format("torchspan/host/{}", rank); }
/// "one" or "many" hosts, the job's id, and the address of rank 0's store; or kFailed, the number of an ErrorKind and why;
/// or kJoined and the presence() of rank 0; or kEnded.
constexpr const char* kAddressKey = "torchspan/store";
constexpr std::string_view kFailed = "failed: ";
constexpr std::string_view kJoined = "joined: ";
constexpr const char* kEnded = "ended";
/// Between two looks at the address of a world whose ranks have all joined.
constexpr Duration kPause = std::chrono::milliseconds(10);

bool is_open(const Place& place) { return place.size == rendezvous::kOpenWorld; }

}  // namespace

Job::Job(c10d::Store* store, Place place, Duration timeout)
    : store_(store), timeout_(timeout), place_(std::move(place)) {
  or_tell_others([this] {
    if (store_ != nullptr) {
      meet();
      make_environment();
      environment_ = rendezvous::read_environment(variables_);
      environment_.master_port = 0;  // rank 0 serves the store at a free port
    } else {
      read_variables();
    }
    const auto level = variables_.find("TORCHSPAN_LOG_LEVEL");
    runtime_ = make_own_runtime(environment_.name, level == variables_.end() || level->second.empty()
                                                       ? LogLevel::kWarning
                                                       : parse_log_level(level->second));
    network_ = rendezvous::read_network(variables_);
    if (place_.size != 1) secret_ = rendezvous::load_secret(environment_);
  });
}

void Job::read_variables() {
  variables_ = rendezvous::process_environment();
  if (!place_.name.empty()) variables_["TORCHSPAN_NAME"] = place_.name;
  if (place_.rank >= 0) variables_["RANK"] = std::to_string(place_.rank);
  if (place_.size >= 0) variables_["WORLD_SIZE"] = std::to_string(place_.size);
  environment_ = rendezvous::read_environment(variables_);
  place_.rank = environment_.rank;
  place_.size = environment_.world_size;
  one_host_ = environment_.one_host();
  id_ = environment_.job;
}

std::string Job::presence() const { return fmt::format("{} {}", place_.size, this_host()); }

void Job::check_size(int rank, const std::string& present) const {
  const std::string size = present.substr(0, present.find(' '));
  if (size == std::to_string(place_.size)) return;
  const auto worded = [](const std::string& number) { return number == "0" ? "none" : number; };
  throw_invalid("rank {} has world_size {}, and rank {} has {}: give all ranks the same", place_.rank,
                worded(std::to_string(place_.size)), rank, worded(size));
}

std::string Job::value_of(const std::string& key) {
  try {
    return text_of(store_->get(key));
  } catch (const std::exception&) {
    std::vector<int> absent;
    for (int rank = 0; rank < place_.size; ++rank) {
      if (!store_->check({host_key(rank)})) absent.push_back(rank);
    }
    if (is_open(place_)) {
      throw Error(ErrorKind::kTimedOut,
                  "rank 0 of this open world did not join in time: start it with rank=0, and all workers "
                  "without a world_size");
    }
    if (absent.empty()) throw;
    throw Error(
        ErrorKind::kTimedOut,
        fmt::format("ranks {} of a world of {} did not join in time: start them, or give all ranks the "
                    "world_size of those that run",
                    fmt::join(absent, ", "), place_.size));
  }
}

std::string Job::await_address() {
  const std::unique_ptr<Executor> executor = make_executor();
  const Deadline end = executor->deadline_in(timeout_);
  for (;;) {
    std::string published = value_of(kAddressKey);
    if (!published.starts_with(kJoined)) return published;
    if (end.passed(executor->now())) {
      check_size(0, published.substr(kJoined.size()));
      throw Error(ErrorKind::kTimedOut, fmt::format("all ranks of a world of {} have joined, and rank {} "
                                                    "comes after them: rank 0 of the next world "
                                                    "did not join in time, or this rank was started twice",
                                                    place_.size, place_.rank));
    }
    executor->sleep(kPause);
  }
}

void Job::meet() {
  store_->set(host_key(place_.rank), bytes_of(presence()));
  if (place_.rank == 0) return meet_rank_0();
  const std::string published = await_address();
  if (published == kEnded) {
    if (!place_.alone_after_end) {
      throw Error(
          ErrorKind::kDisconnected,
          "rank 0 has left this open world, which has ended: start rank 0 again, and then the others");
    }
    place_.rank = 0;
    place_.size = 1;
    return;
  }
  const std::size_t first = published.find(' '), second = published.find(' ', first + 1);
  if (published.starts_with(kFailed)) {
    const int number = std::atoi(published.c_str() + kFailed.size());
    const bool is_kind = number >= 1 && number <= static_cast<int>(ErrorKind::kUnsupported);
    throw Error(is_kind ? static_cast<ErrorKind>(number) : ErrorKind::kInvalid,
                fmt::format("rank 0 cannot open the world: {}", published.substr(second + 1)));
  }
  if (second == std::string::npos)
    throw_invalid("the program's store holds '{}' in place of rank 0's address", published);
  const std::string present = value_of(host_key(0));
  check_size(0, present);
  one_host_ = published.substr(0, first) == "one";
  id_ = published.substr(first + 1, second - first - 1);
  address_ = published.substr(second + 1);
  if (is_open(place_) && one_host_ && present != presence()) {
    throw_invalid(
        "rank 0 is on another host, and expects workers on its own host only: set MASTER_ADDR, on all "
        "workers, to an address of rank 0's host that the others can reach");
  }
}

/// Others may come to an open world later, from other hosts if the master's address leads here from there.
void Job::meet_rank_0() {
  id_ = random_text();
  if (is_open(place_)) {
    const auto named = rendezvous::process_environment()["MASTER_ADDR"];
    const std::string& host = named.empty() ? place_.master_host : named;
    one_host_ = host.empty() || net::is_loopback_host(host);
    return;
  }
  for (int rank = 0; rank < place_.size; ++rank) {
    const std::string other = value_of(host_key(rank));
    check_size(rank, other);
    one_host_ &= other == presence();
  }
}

void Job::make_environment() {
  variables_ = rendezvous::process_environment();
  const std::string size = std::to_string(place_.size), rank = std::to_string(place_.rank);
  variables_["RANK"] = place_.rank == rendezvous::kAnyRank ? "" : rank;
  variables_["WORLD_SIZE"] = size;
  variables_["LOCAL_RANK"] = one_host_ && place_.rank != rendezvous::kAnyRank ? rank : "0";
  variables_["LOCAL_WORLD_SIZE"] = one_host_ ? size : "1";
  variables_["MASTER_PORT"] = "1";  // the port is in the address that rank 0 publishes
  std::string& host = variables_["MASTER_ADDR"];
  if (one_host_) host = "127.0.0.1";
  if (host.empty()) host = place_.master_host;
  if (host.empty()) {
    throw_invalid(
        "the ranks are on several hosts and MASTER_ADDR is not set: set it, on all ranks, to an address of "
        "rank 0's host that the others can reach");
  }
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHSPAN_NAME"}) variables_.erase(name);
  if (!place_.name.empty()) variables_["TORCHSPAN_NAME"] = place_.name;
}

std::unique_ptr<rendezvous::Membership> Job::join(const std::string& address) {
  if (store_ == nullptr || !is_open(place_)) {
    auto joined = join_once(address, timeout_);
    forget_meeting();  // all have joined, so nobody reads it any more
    return joined;
  }
  if (place_.rank == 0) return join_once(address, timeout_);
  // Rank 0 may have left after this worker read its address.
  const Deadline end = runtime_->executor.deadline_in(timeout_);
  for (;;) {
    const TimePoint now = runtime_->executor.now();
    try {
      return join_once(address, std::min(end.left(now), kJoinAttempt));
    } catch (const Error& error) {
      const bool unreached = error.kind() == ErrorKind::kTimedOut || error.kind() == ErrorKind::kDisconnected;
      if (!unreached || end.passed(runtime_->executor.now())) throw;
      meet();
    }
  }
}

/// A later world may meet at the same place in the program's store. A rank that this one does not expect learns there why it
/// cannot join.
void Job::forget_meeting() {
  if (store_ == nullptr) return;
  try {
    store_->deleteKey(host_key(place_.rank));
    if (place_.rank == 0) store_->set(kAddressKey, bytes_of(std::string(kJoined) + presence()));
  } catch (const std::exception&) {  // some stores cannot
  }
}

std::unique_ptr<rendezvous::Membership> Job::join_once(const std::string& address, Duration timeout) {
  rendezvous::MembershipOptions options;
  options.name = environment_.name;
  options.rank = place_.rank;
  options.world_size = place_.size;
  options.timeout = timeout;
  options.job = id_;
  options.address = address;
  options.dead_after = std::max(network_.tls.dead_after, 2 * options.heartbeat);
  options.store_address = address_.empty() ? environment_.store_address() : address_;
  const bool over_tls = options.store_address.starts_with("tls:");
  if (over_tls && place_.rank == 0 && !environment_.listen_host.empty()) {
    rendezvous::WorkerEnvironment at = environment_;
    at.master_host = environment_.listen_host;
    options.store_listen = at.store_address();
  }
  if (store_ != nullptr) {
    options.store_ready = [this](const std::string& ready) {
      store_->set(kAddressKey, bytes_of(fmt::format("{} {} {}", one_host_ ? "one" : "many", id_, ready)));
    };
  } else {
    options.functions = functions_.descriptions();
    options.functions_digest = functions_.digest();
    options.require_same_functions = false;
  }
  rendezvous::TransportFactory transports;
  if (place_.size != 1) {
    Executor& executor = runtime_->executor;
    transports = over_tls ? rendezvous::tls_transports(executor, secret_, network_.tls)
                          : rendezvous::stream_transports(executor, secret_);
  }
  return or_tell_others(
      [&] { return rendezvous::Membership::join(*runtime_, std::move(transports), std::move(options)); });
}

std::pair<std::unique_ptr<rpc::WorkerService>, std::string> Job::make_service(
    rpc::ServiceOptions options, FunctionTable functions,
    std::vector<std::unique_ptr<rpc::Extension>> extensions) {
  return or_tell_others([&] {
    options.rank = static_cast<std::uint32_t>(std::max(place_.rank, 0));
    std::optional<rendezvous::WorkerNetwork> network;
    rpc::WorkerService::MakeTransport make_transport;
    if (place_.size != 1) {
      rendezvous::WorkerNetworkOptions reach{environment_, network_, {}, {}};
      reach.transport.secret = secret_;
      network.emplace(*runtime_, std::move(reach));
      options.listen = network->listen();
      make_transport = [&](net::Handler& handler) { return network->make_transport(handler); };
    }
    auto service = std::make_unique<rpc::WorkerService>(runtime_, std::move(functions), std::move(options),
                                                        make_transport, std::move(extensions));
    std::string address = network ? network->advertised_address(service->address()) : std::string();
    return std::pair(std::move(service), std::move(address));
  });
}

std::unique_ptr<rpc::WorkerService> Job::start(rpc::ServiceOptions options, FunctionTable functions,
                                               std::vector<std::unique_ptr<rpc::Extension>> extensions) {
  functions_ = functions;
  auto [service, address] = make_service(std::move(options), std::move(functions), std::move(extensions));
  auto membership = join(address);
  place_.rank = membership->self().rank;
  service->start(std::move(membership));
  return std::move(service);
}

std::unique_ptr<Observation> Job::observe(const std::string& name) const {
  TraceIdentity identity = identify(runtime_->executor, name, place_.rank, place_.size);
  identity.run = id_;
  identity.attempt = environment_.restart_count;
  ObservationOptions options = ObservationOptions::from(variables_);
  try {
    return std::make_unique<Observation>(runtime_, options, identity);
  } catch (const Error& error) {
    if (!options.metrics_port) throw;
    // The groups and the calls of a process are observed separately, and the first of them has its port.
    runtime_->log.warning(error.message());
    options.metrics_port.reset();
    return std::make_unique<Observation>(runtime_, options, identity);
  }
}

void Job::end_open_world(c10d::Store& store, const rendezvous::Membership& membership) {
  if (membership.open() && membership.self().rank == 0) store.set(kAddressKey, bytes_of(kEnded));
}

std::shared_ptr<World> World::join(c10d::Store& store, const Place& place, Duration timeout) {
  const auto end = [process = OwnerProcess()](World* world) {
    if (!process.is_current()) return keep_until_exit(world);
    without_gil([world] { delete world; });
  };
  return {new World(store, place, timeout), end};
}

World::World(c10d::Store& store, const Place& place, Duration timeout) {
  Job job(&store, place, timeout);
  runtime_ = job.runtime();
  membership_ = job.join();
  callbacks_ = std::make_shared<Pool>(runtime_->executor, PoolOptions{.name = "callbacks", .threads = 1});
  observation_ = job.observe(membership_->self().name);
}

World::~World() {
  if (!callbacks_->is_pool_thread()) {
    callbacks_->stop();
    return;
  }
  // A callback had the last reference to the last process group: the thread that runs it cannot end its own pool.
  static_cast<void>(new std::shared_ptr<Runtime>(runtime_));  // nor destroy the runtime that waits for it
  runtime_->deferred_destroy.keep(std::move(callbacks_));
}

void World::post(UniqueFunction<void()> job) {
  callbacks_->post([pool = callbacks_.get(), job = std::move(job)]() mutable {
    std::optional<Pool::BlockingScope> may_block;
    try {
      may_block.emplace(*pool);
    } catch (const Error&) {
      // The most threads wait already: those behind this callback wait for it, too.
    }
    job();
  });
}

collective::Group World::make_group(collective::GroupOptions options) {
  return collective::Group::make(runtime_, *membership_, std::move(options));
}

void World::leave(Duration timeout) {
  runtime_->check_process();  // others would see the parent leave
  membership_->leave(runtime_->executor.deadline_in(timeout));
}

Background::Background(Executor& executor, const std::string& name, std::function<void()> body)
    : state_(std::make_shared<State>()) {
  state_->parker = executor.make_parker();
  thread_ = executor.spawn(name, [state = state_, body = std::move(body)] {
    try {
      body();
    } catch (...) {
      state->error = std::current_exception();
    }
    state->ended.store(true);
    state->parker->unpark();
  });
}

Background::~Background() {
  if (!thread_.joinable()) return;
  if (state_->ended.load()) {
    thread_.join();
  } else {
    keep_until_exit(new Thread(std::move(thread_)));
  }
}

bool Background::wait_until(Deadline deadline) {
  if (!state_->ended.load()) state_->parker->park(deadline);
  return state_->ended.load();
}

void Background::finish() {
  thread_.join();
  if (state_->error) std::rethrow_exception(state_->error);
}

void stop_before_exit(Runtime& runtime, const std::shared_ptr<rpc::WorkerBackend>& backend,
                      std::function<void()> stop) {
  Background stopping(runtime.executor, backend->self().name + "/exit", std::move(stop));
  if (stopping.wait_until(runtime.executor.deadline_in(kExitTime))) return stopping.finish();
  runtime.log.warning(
      fmt::format("the program ends while functions that it serves still run: {}", backend->debug().str()));
}

/// The others wait for the address, and the program's store names no reason.
void Job::tell_others(const Error& error) {
  if (store_ == nullptr || place_.rank != 0) return;
  if (!store_->check({kAddressKey}) || text_of(store_->get(kAddressKey)).starts_with(kJoined))
    store_->set(kAddressKey,
                bytes_of(fmt::format("{}{} {}", kFailed, static_cast<int>(error.kind()), error.message())));
}

}  // namespace torchspan::python
