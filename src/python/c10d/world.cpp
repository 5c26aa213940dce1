#include "python/c10d/world.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>

#include <torchspan/detail/core/runtime.h>

#include "python/gil.h"
#include "rendezvous/api/environment.h"

namespace torchspan::python {
namespace {

/// How many bytes of random text tell one world from another that uses the same port.
constexpr int kJobBytes = 16;

/// Equal on processes that reach each other over loopback: of one boot, in one network namespace.
std::string this_host() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::error_code ignored;
  return boot + " " + std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
}

std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string random_text() {
  std::string text;
  for (const std::byte byte : net::Secret::random().bytes().first(kJobBytes))
    text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

std::string host_key(int rank) { return fmt::format("torchspan/host/{}", rank); }
constexpr const char* kAddressKey = "torchspan/store";

/// Whether all ranks are on this host; decided by rank 0 and passed on with its address.
bool on_one_host(c10d::Store& store, const World::Place& place) {
  for (int rank = 0; rank < place.size; ++rank) {
    if (text_of(store.get(host_key(rank))) != this_host()) return false;
  }
  return true;
}

/// The launcher's variables with what c10d knows in their place.
rendezvous::Environment environment_of(const World::Place& place, bool one_host) {
  rendezvous::Environment variables = rendezvous::process_environment();
  const std::string size = std::to_string(place.size), rank = std::to_string(place.rank);
  variables["RANK"] = rank;
  variables["WORLD_SIZE"] = size;
  variables["LOCAL_RANK"] = one_host ? rank : "0";
  variables["LOCAL_WORLD_SIZE"] = one_host ? size : "1";
  variables["MASTER_PORT"] = "1";  // the port is in the address that rank 0 publishes
  std::string& host = variables["MASTER_ADDR"];
  if (one_host) host = "127.0.0.1";
  if (host.empty()) host = place.master_host;
  if (host.empty()) {
    throw Error(ErrorKind::kInvalid,
                "the ranks are on several hosts and MASTER_ADDR is not set: set it, on all ranks, to an "
                "address of rank "
                "0's host that the others can reach");
  }
  for (const char* name : {"TORCHELASTIC_USE_AGENT_STORE", "TORCHSPAN_NAME"}) variables.erase(name);
  return variables;
}

}  // namespace

std::shared_ptr<World> World::join(c10d::Store& store, const Place& place, Duration timeout) {
  const auto end = [process = OwnerProcess()](World* world) {
    if (!process.is_current()) return keep_until_exit(world);
    without_gil([world] { delete world; });
  };
  return {new World(store, place, timeout), end};
}

World::World(c10d::Store& store, const Place& place, Duration timeout) {
  store.set(host_key(place.rank), bytes_of(this_host()));
  // "one" or "many", the job's id, and the address of the membership's store, in one value.
  std::string job, address;
  bool one_host = true;
  if (place.rank == 0) {
    one_host = on_one_host(store, place);
    job = random_text();
  } else {
    const std::string published = text_of(store.get(kAddressKey));
    const std::size_t first = published.find(' '), second = published.find(' ', first + 1);
    if (second == std::string::npos) {
      throw Error(
          ErrorKind::kInvalid,
          published.starts_with("failed: ")
              ? fmt::format("rank 0 cannot open the world: {}", published.substr(8))
              : fmt::format("the program's store holds '{}' in place of rank 0's address", published));
    }
    one_host = published.substr(0, first) == "one";
    job = published.substr(first + 1, second - first - 1);
    address = published.substr(second + 1);
  }
  const auto publish = [&store](const std::string& text) { store.set(kAddressKey, bytes_of(text)); };
  try {
    const rendezvous::Environment variables = environment_of(place, one_host);
    const rendezvous::WorkerEnvironment environment = rendezvous::read_environment(variables);
    const auto level = variables.find("TORCHSPAN_LOG_LEVEL");
    runtime_ = make_own_runtime(environment.name, level == variables.end() || level->second.empty()
                                                      ? LogLevel::kWarning
                                                      : parse_log_level(level->second));
    const net::NetworkOptions network = rendezvous::read_network(variables);
    rendezvous::MembershipOptions options;
    options.name = environment.name;
    options.rank = place.rank;
    options.world_size = place.size;
    options.timeout = timeout;
    options.job = job;
    options.dead_after = std::max(network.tls.dead_after, 2 * options.heartbeat);
    // Rank 0 serves the store at a free port.
    rendezvous::WorkerEnvironment at = environment;
    at.master_port = 0;
    options.store_address = address.empty() ? at.store_address() : address;
    const bool over_tls = options.store_address.starts_with("tls:");
    if (over_tls && place.rank == 0 && !environment.listen_host.empty()) {
      at.master_host = environment.listen_host;
      options.store_listen = at.store_address();
    }
    options.store_ready = [&](const std::string& ready) {
      publish(fmt::format("{} {} {}", one_host ? "one" : "many", job, ready));
    };
    rendezvous::TransportFactory transports;
    if (place.size > 1) {
      net::Secret secret = rendezvous::load_secret(environment);
      Executor& executor = runtime_->executor;
      transports = over_tls ? rendezvous::tls_transports(executor, std::move(secret), network.tls)
                            : rendezvous::stream_transports(executor, std::move(secret));
    }
    callbacks_ = std::make_shared<Pool>(runtime_->executor, PoolOptions{.name = "callbacks", .threads = 1});
    membership_ = rendezvous::Membership::join(*runtime_, std::move(transports), std::move(options));
    TraceIdentity identity = identify(runtime_->executor, environment.name, place.rank, place.size);
    identity.run = job;
    identity.attempt = environment.restart_count;
    observation_ = std::make_unique<Observation>(runtime_, ObservationOptions::from(variables), identity);
  } catch (const Error& error) {
    // The others wait for the address, and the program's store names no reason.
    if (place.rank == 0 && !store.check({kAddressKey})) publish(fmt::format("failed: {}", error.what()));
    throw;
  }
}

World::~World() {
  if (callbacks_) callbacks_->stop();
}

void World::post(UniqueFunction<void()> job) {
  callbacks_->post([pool = callbacks_.get(), job = std::move(job)]() mutable {
    const Pool::BlockingScope may_block(*pool);
    job();
  });
}

collective::Group World::make_group(collective::GroupOptions options) {
  return collective::Group::make(runtime_, *membership_, std::move(options));
}

void World::leave(Duration timeout) { membership_->leave(runtime_->executor.deadline_in(timeout)); }

}  // namespace torchspan::python
