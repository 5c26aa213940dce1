#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>
#include <unistd.h>

#include <torchspan/detail/rendezvous/membership.h>

#include "core/api/system_files.h"
#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"
#include "net/api/network.h"
#include "net/api/stream.h"
#include "net/api/tls.h"
#include "rendezvous/api/environment.h"
#include "rendezvous/api/process_stat.h"
#include "rendezvous/client/client.h"
#include "rendezvous/messages/messages.h"
#include "rendezvous/store/store_server.h"

namespace torchspan::rendezvous {
namespace {

/// How long rank 0 keeps reporting to the others why the world failed.
constexpr Duration kFailureNoticeTime = std::chrono::seconds(2);
/// How long a worker that gives up waits for the store to acknowledge it.
constexpr Duration kLastOutputTime = std::chrono::seconds(2);
/// How long a direct connection waits for the peer to acknowledge its end.
constexpr Duration kDirectLinger = std::chrono::seconds(2);
constexpr std::uint64_t kMostMessageBytes = std::uint64_t{256} << 20;

std::string host_name() {
  std::string name(256, '\0');
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  name.resize(name.find('\0'));
  return name;
}

void check_options(const MembershipOptions& options) {
  check_name(options.name, "the worker's name");
  const auto refuse = [](std::string text) { throw_invalid(std::move(text)); };
  const int size = options.world_size, rank = options.rank;
  if (size < 0) refuse(fmt::format("world_size is {}; expected 1 or more, or 0: an open world", size));
  if (size == kOpenWorld && rank < kAnyRank) {
    refuse(fmt::format("rank is {}; an open world expects 0 or more, or {}: any", rank, kAnyRank));
  }
  if (size != kOpenWorld && (rank < 0 || rank >= size)) {
    refuse(fmt::format("rank is {}; a world of {} expects 0 to {}", rank, size, size - 1));
  }
  if (options.heartbeat <= Duration::zero() || options.dead_after / 2 < options.heartbeat) {
    refuse(
        fmt::format("heartbeat is {:g} s and dead_after {:g} s; expected a heartbeat of more than zero "
                    "and a dead_after of at least two heartbeats",
                    to_seconds(options.heartbeat), to_seconds(options.dead_after)));
  }
}

/// Rank 0 has a connection to every worker, so it fails at once if its limit of descriptors forbids that.
void check_descriptors(const MembershipOptions& options) {
  constexpr rlim_t kOthers = 32;  // files, libraries, and connections of this process
  rlimit limit{};
  const auto wanted = static_cast<rlim_t>(options.world_size) + kOthers;
  if (options.store_address.starts_with("sim:") || ::getrlimit(RLIMIT_NOFILE, &limit) != 0 ||
      limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted) {
    return;
  }
  throw Error(
      ErrorKind::kOverloaded,
      fmt::format("rank 0 serves {} workers and needs at least {} file descriptors, but its limit is {} "
                  "(of at most {}): start it after 'ulimit -n {}'",
                  options.world_size, wanted, limit.rlim_cur, limit.rlim_max, 2 * wanted));
}

Member make_self(const MembershipOptions& options) {
  Member self;
  self.name = options.name;
  self.rank = options.rank;
  self.address = options.address;
  self.instance = options.instance != 0 ? options.instance : random_instance();
  self.host = host_name();
  self.host_id = options.host_id.empty() ? boot_id() : options.host_id;
  self.pid = getpid();
  if (const auto stat = read_process_stat(self.pid)) self.start_ticks = stat->start_ticks;
  self.uid = geteuid();
  self.functions_digest = options.functions_digest;
  self.wire = options.wire;
  return self;
}

}  // namespace

std::string describe(const Member& member) {
  const std::string rank = member.rank == kAnyRank ? "no rank yet" : fmt::format("rank {}", member.rank);
  return fmt::format("{} ({}, pid {} on {})", member.name, rank, member.pid, member.host);
}

namespace {

constexpr std::string_view kDirect = ".direct.";

std::string call_text(const std::string& what, const std::string& tag) {
  return fmt::format("{} '{}'", what, tag);
}

net::Secret secret_for(const net::Secret& secret, std::string_view use) {
  return secret.empty() ? secret : secret.derived(use);
}

/// Of the connections between members that Membership::listen() makes.
net::TransportOptions direct_options(const net::Secret& secret) {
  net::TransportOptions options;
  options.secret = secret_for(secret, "torchspan direct");
  options.max_header = std::uint64_t{64} << 10;
  options.max_message = kMostMessageBytes;
  options.max_segments = 1;
  options.linger = kDirectLinger;
  return options;
}

net::TransportOptions store_options(const net::Secret& secret) {
  net::TransportOptions options;
  // A proof between the store and its members must not be valid between workers.
  options.secret = secret_for(secret, "torchspan store");
  options.max_header = kMostMessageBytes;
  options.max_message = kMostMessageBytes;
  options.max_segments = 1;  // of large messages from the store; limits hold for both directions
  options.max_unsent = 2 * kMostMessageBytes;
  return options;
}

net::TransportOptions options_of(const std::string& endpoint, const net::Secret& secret) {
  return endpoint.find(kDirect) == std::string::npos ? store_options(secret) : direct_options(secret);
}

/// Where a member listens for direct connections: like the store, on loopback, in a simulation, or over TLS
/// on the host that its own address names; without one, on the host from which it reaches the store.
std::string direct_address(const std::string& endpoint, const Member& self,
                           const std::string& store_address) {
  if (store_address.starts_with("sim:")) return "sim:" + endpoint;
  if (!store_address.starts_with("tls:")) return "tcp:127.0.0.1:0";
  std::string host = net::host_of_route(self.address);
  if (host.empty()) host = net::route_to(net::host_of_route(store_address));
  return host.find(':') == std::string::npos ? fmt::format("tls:{}:0", host)
                                             : fmt::format("tls:[{}]:0", host);
}

/// `address`, with the port of `bound` in place of port 0.
std::string with_port_of(const std::string& address, const std::string& bound) {
  return address.ends_with(":0") ? address.substr(0, address.size() - 1) + bound.substr(bound.rfind(':') + 1)
                                 : address;
}

}  // namespace

TransportFactory stream_transports(Executor& executor, net::Secret secret) {
  return [&executor, secret = std::move(secret)](const std::string& endpoint, net::Handler& handler) {
    return net::make_stream_transport(executor, handler, options_of(endpoint, secret));
  };
}

TransportFactory tls_transports(Executor& executor, net::Secret secret, net::TlsOptions tls) {
  tls.lanes = 0;
  return [&executor, secret = std::move(secret), tls = std::move(tls)](const std::string& endpoint,
                                                                       net::Handler& handler) {
    return net::make_tls_transport(executor, handler, options_of(endpoint, secret), tls);
  };
}

/// `client` and `server` are null in a fixed world of one; `server` is rank 0's, and outlives its client.
class Membership::Impl {
 public:
  Impl(Runtime& runtime, const TransportFactory& transports, MembershipOptions options)
      : runtime_(runtime),
        transports_(transports),
        store_address_(options.store_address),
        open_(options.world_size == kOpenWorld),
        self_(make_self(options)) {
    if (options.world_size == 1) return;
    if (options.rank == 0) {
      check_descriptors(options);
      server_ = std::make_unique<StoreServer>(
          runtime, transports, options.store_listen.empty() ? options.store_address : options.store_listen,
          StoreOptions{.world_size = options.world_size,
                       .job = options.job,
                       .host_id = self_.host_id,
                       .heartbeats = {options.heartbeat, options.dead_after},
                       .versions = options.store});
      options.store_address = with_port_of(options.store_address, server_->address());
      store_address_ = options.store_address;
      if (options.store_ready) options.store_ready(store_address_);
    }
    client_ = std::make_unique<Client>(runtime, transports, std::move(options), self_);
    try {
      self_ = client_->join();
    } catch (...) {
      client_.reset();
      if (server_) server_->finish(runtime.executor.deadline_in(kFailureNoticeTime));
      throw;
    }
  }

  ~Impl() {
    if (client_) client_->end_part(Error(ErrorKind::kCancelled, "the membership of this worker has ended"));
    forget_callbacks();
  }
  Impl(const Impl&) = delete;

  void watch(Callbacks callbacks) {
    if (client_) return client_->watch(std::move(callbacks));
    MutexLock lock(mutex_);
    if (!left_) callbacks_.push_back(std::move(callbacks));
  }

  std::vector<Bytes> gather(const std::string& what, const std::string& tag, BytesView mine,
                            std::vector<int> ranks, const Wait& wait) {
    return in_round(what, tag, mine, ranks, [&]() -> std::vector<Bytes> {
      if (!client_) return {Bytes(mine.begin(), mine.end())};
      const std::string call = call_text(what, tag);
      Contribute message = client_->contribution(tag, mine, ranks, wait.until);
      message.once = wait.once;
      return client_->rounds().gather(call, std::move(message), with_warnings(wait, call, ranks));
    });
  }

  CountSums sum(const std::string& tag, std::vector<std::uint64_t> counts, BytesView note,
                std::vector<int> ranks, const Wait& wait) {
    return in_round("sum", tag, note, ranks, [&]() -> CountSums {
      if (counts.empty() || counts.size() > kMostCounts) {
        throw_invalid("there are {} counts; expected 1 to {}", counts.size(), kMostCounts);
      }
      if (client_) {
        Contribute message = client_->contribution(tag, note, ranks, wait.until);
        message.counts = std::move(counts);
        const std::string call = call_text("sum", tag);
        return client_->rounds().sum(call, std::move(message), with_warnings(wait, call, ranks));
      }
      CountSums sums{.counts = std::move(counts), .notes = {}, .noted = note.empty() ? 0U : 1U};
      if (!note.empty()) sums.notes.push_back({self_.rank, Bytes(note.begin(), note.end())});
      return sums;
    });
  }

  /// How a gather that calls back ends.
  struct Ending {
    Deadline deadline;
    bool once = false;  ///< Contribute::once
    GatherCallback done;
  };
  void gather_async(const std::string& tag, BytesView mine, std::vector<int> ranks, Ending ending) {
    const std::string call = fmt::format("all_gather '{}'", tag);
    try {
      check_round(tag, mine, ranks);
      if (!client_) return ending.done({Bytes(mine.begin(), mine.end())}, std::nullopt);
      Contribute message = client_->contribution(tag, mine, ranks, ending.deadline);
      message.once = ending.once;
      client_->rounds().gather_async(
          std::move(message),
          [call, done = std::move(ending.done)](std::vector<Bytes> all, std::optional<Error> failure) {
            if (failure) failure = Error(*failure).with_call(call);
            done(std::move(all), std::move(failure));
          });
    } catch (const Error& error) {
      throw Error(error).with_call(call);
    }
  }

  Listening listen(const std::string& use, net::Handler& handler) const {
    if (!client_) throw_invalid("a world of one worker has no members to connect to");
    const std::string endpoint = fmt::format("{}{}{}", self_.name, kDirect, use);
    Listening listening{.transport = transports_(endpoint, handler), .address = {}};
    listening.address = listening.transport->listen(direct_address(endpoint, self_, store_address_));
    return listening;
  }

  void leave(Deadline deadline) {
    refuse_in_callbacks();
    if (left_.exchange(true)) return;
    forget_callbacks();
    if (!client_) return;
    client_->leave(deadline);
    if (!server_) return;
    const std::string others = server_->finish(deadline);
    server_.reset();
    if (!others.empty()) {
      runtime_.log.warning(fmt::format("rank 0 ended its store before these had left: {}", others));
    }
  }

  void give_up(const std::string& why) {
    if (left_.exchange(true)) return;
    forget_callbacks();
    if (!client_) return;
    client_->give_up(why, runtime_.executor.deadline_in(kLastOutputTime));
  }

  bool is_present(int rank) const {
    const Client::Known known =
        open_ && rank >= 0 ? find(rank).value_or(Client::Known{{}, Presence::kLeft}) : get(rank);
    return known.presence == Presence::kPresent;
  }

  Condition condition(int rank) const {
    const auto [member, presence, death] = get(rank);
    if (presence == Presence::kDied) return Condition::kDead;
    if (presence == Presence::kLeft) return Condition::kLeft;
    if (rank == self_.rank || member.host_id != self_.host_id) return Condition::kPresent;
    const auto stat = read_process_stat(member.pid);
    const bool same = stat && stat->start_ticks == member.start_ticks;
    return same && stat->stopped() ? Condition::kStopped : Condition::kPresent;
  }

  /// Throws kInvalid with the ranks that exist.
  Client::Known get(int rank) const {
    if (auto known = find(rank)) return *std::move(known);
    std::vector<int> ranks;
    for (const Member& member : members()) ranks.push_back(member.rank);
    throw_invalid(open_ ? fmt::format("there is no rank {} in this open world yet; there are {}", rank, ranks)
                        : fmt::format("there is no rank {} in this world; ranks go from 0 to {}", rank,
                                      ranks.size() - 1));
  }

  Member member(std::string_view name) const {
    if (client_) {
      if (auto found = client_->find_named(name)) return *std::move(found);
    }
    std::vector<std::string> names;
    for (const Member& member : members()) {
      if (member.name == name) return member;
      names.push_back(member.name);
    }
    throw_invalid("there is no worker '{}' in this world; there are {}", name, fmt::join(names, ", "));
  }

  const Member& self() const { return self_; }
  bool open() const { return open_; }
  std::vector<Member> members() const { return client_ ? client_->members() : std::vector<Member>{self_}; }
  int world_size() const { return client_ ? static_cast<int>(client_->ranks().size()) : 1; }

 private:
  /// Checks the parameters of a round, runs it, and adds its name and duration to its error.
  template <class Round>
  std::invoke_result_t<Round> in_round(const std::string& what, const std::string& tag, BytesView mine,
                                       std::vector<int>& ranks, Round round) {
    const TimePoint began = runtime_.executor.now();
    try {
      check_round(tag, mine, ranks);
      refuse_in_callbacks();
      return round();
    } catch (const Error& error) {
      throw Error(error).with_call(call_text(what, tag)).with_elapsed(runtime_.executor.now() - began);
    }
  }

  /// A wait without reports warns of missing ranks after 10 s, 20 s, 40 s, …. Only the first rank that waits does, as the
  /// others would say the same, and each rank to which the store does not answer.
  Wait with_warnings(Wait wait, const std::string& call, const std::vector<int>& ranks) const {
    if (wait.report) return wait;
    wait.every = WaitWarnings().next();
    const auto now_and_again = [this, began = runtime_.executor.now(), warnings = WaitWarnings()]() mutable {
      const Duration waited = runtime_.executor.now() - began;
      return warnings.due(waited) ? fmt::format("has waited {:.0f} s", to_seconds(waited)) : std::string();
    };
    wait.report = [this, call, ranks,
                   has_waited = now_and_again](const std::vector<Member>& missing) mutable {
      const auto misses = [&](int rank) {
        return std::any_of(missing.begin(), missing.end(), [&](const auto& one) { return one.rank == rank; });
      };
      const auto first = std::find_if_not(ranks.begin(), ranks.end(), misses);
      const std::string waited = first == ranks.end() || *first == self_.rank ? has_waited() : "";
      if (waited.empty()) return;
      std::vector<const Member*> members;
      for (const Member& member : missing) members.push_back(&member);
      runtime_.log.warning(fmt::format(
          "{} {} for {}, which must make the same call: torchspan stacks shows what each rank does", call,
          waited, list_members(members)));
    };
    wait.no_answer = [this, call, has_waited = now_and_again]() mutable {
      const std::string waited = has_waited();
      if (waited.empty()) return;
      const bool stopped = condition(0) == Condition::kStopped;
      const Member rank0 = get(0).member;
      runtime_.log.warning(fmt::format(
          "{} {}: {}, which serves the store, {}", call, waited, describe(rank0),
          stopped ? fmt::format("is stopped; to continue it: kill -CONT {}", rank0.pid) : "does not answer"));
    };
    return wait;
  }

  void forget_callbacks() {
    std::vector<Callbacks> forgotten;  // destroyed without the lock
    {
      MutexLock lock(mutex_);
      forgotten.swap(callbacks_);
    }
  }

  std::optional<Client::Known> find(int rank) const {
    if (client_) return client_->find(rank);
    return rank == self_.rank ? std::optional(Client::Known{self_}) : std::nullopt;
  }

  /// Returns `ranks` in ascending order without duplicates; empty means all ranks of a fixed world. Must
  /// contain this worker's rank.
  void check_ranks(std::vector<int>& ranks) const {
    if (ranks.empty() && open_) {
      throw_invalid("an open world has no fixed set of ranks: name the ranks that take part");
    }
    std::vector<int> all = client_ ? client_->ranks() : std::vector<int>{self_.rank};
    if (ranks.empty()) {
      ranks = std::move(all);
    } else {
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
      for (const int rank : ranks) {
        if (!std::binary_search(all.begin(), all.end(), rank)) get(rank);
      }
    }
    if (!std::binary_search(ranks.begin(), ranks.end(), self_.rank)) {
      throw_invalid("this worker (rank {}) is not among the ranks {} that take part", self_.rank, ranks);
    }
  }

  void check_round(const std::string& tag, BytesView mine, std::vector<int>& ranks) const {
    check_ranks(ranks);
    check_name(tag, "the tag");
    if (mine.size() > kMostGatherBytes) {
      throw_invalid("{} bytes are more than the {} that a worker may contribute", mine.size(),
                    kMostGatherBytes);
    }
    if (!client_ && left_) throw Error(ErrorKind::kCancelled, "this worker has left the world");
  }

  void refuse_in_callbacks() const {
    if (!client_ || !client_->is_callback_thread()) return;
    throw_invalid("a membership callback must not wait for the membership: hand the work to another thread");
  }

  Runtime& runtime_;
  const TransportFactory transports_;
  std::string store_address_;
  const bool open_;
  Member self_;  ///< complete once the constructor is done
  std::atomic<bool> left_{false};
  Mutex mutex_;
  std::vector<Callbacks> callbacks_ TORCHSPAN_GUARDED_BY(mutex_);  ///< used without a client
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<Client> client_;
};

Membership::Membership(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Membership::~Membership() = default;

std::unique_ptr<Membership> Membership::join(Runtime& runtime, TransportFactory transports,
                                             MembershipOptions options) {
  check_options(options);
  const std::string name = options.name;
  try {
    auto impl = std::make_unique<Impl>(runtime, transports, std::move(options));
    return std::unique_ptr<Membership>(new Membership(std::move(impl)));
  } catch (const Error& error) {
    throw Error(error).with_worker(name).with_call("join");
  }
}

const Member& Membership::self() const { return impl_->self(); }
bool Membership::open() const { return impl_->open(); }
std::vector<Member> Membership::members() const { return impl_->members(); }
int Membership::world_size() const { return impl_->world_size(); }
Member Membership::member(std::string_view name) const { return impl_->member(name); }
Member Membership::member(int rank) const { return impl_->get(rank).member; }
bool Membership::is_present(int rank) const { return impl_->is_present(rank); }
Condition Membership::condition(int rank) const { return impl_->condition(rank); }

void Membership::watch(Callbacks callbacks) { impl_->watch(std::move(callbacks)); }

void Membership::on_join(JoinCallback callback) { watch({.joined = std::move(callback)}); }
void Membership::on_death(DeathCallback callback) { watch({.died = std::move(callback)}); }
void Membership::on_departure(DepartureCallback callback) { watch({.left = std::move(callback)}); }

void Membership::barrier(const std::string& tag, std::vector<int> ranks, Deadline deadline) {
  impl_->gather("barrier", tag, {}, std::move(ranks), {.until = deadline});
}

std::vector<Bytes> Membership::all_gather_bytes(const std::string& tag, BytesView mine,
                                                std::vector<int> ranks, Deadline deadline) {
  return impl_->gather("all_gather", tag, mine, std::move(ranks), {.until = deadline});
}

std::vector<Bytes> Membership::all_gather_bytes(const std::string& tag, BytesView mine,
                                                std::vector<int> ranks, Wait wait) {
  return impl_->gather("all_gather", tag, mine, std::move(ranks), wait);
}

CountSums Membership::sum(const std::string& tag, std::vector<std::uint64_t> counts, BytesView note,
                          std::vector<int> ranks, const Wait& wait) {
  return impl_->sum(tag, std::move(counts), note, std::move(ranks), wait);
}

void Membership::all_gather_bytes_async(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                        Deadline deadline, GatherCallback done) {
  impl_->gather_async(tag, mine, std::move(ranks), {.deadline = deadline, .done = std::move(done)});
}

void Membership::all_gather_bytes_once(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                       GatherCallback done) {
  impl_->gather_async(tag, mine, std::move(ranks),
                      {.deadline = Deadline::never(), .once = true, .done = std::move(done)});
}

Membership::Listening Membership::listen(const std::string& use, net::Handler& handler) const {
  return impl_->listen(use, handler);
}

void Membership::leave(Deadline deadline) { impl_->leave(deadline); }
void Membership::give_up(const std::string& why) { impl_->give_up(why); }

}  // namespace torchspan::rendezvous
