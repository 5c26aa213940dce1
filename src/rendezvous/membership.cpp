#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fstream>
#include <random>
#include <unistd.h>

#include <torchspan/net/stream.h>
#include <torchspan/rendezvous/membership.h>

#include "rendezvous/client.h"
#include "rendezvous/messages.h"
#include "rendezvous/names.h"
#include "rendezvous/store_server.h"

namespace torchspan::rendezvous {
namespace {

/// How long rank 0 goes on telling the others why the world failed.
constexpr Duration kBadNewsTime = std::chrono::seconds(2);
constexpr std::uint64_t kMostMessageBytes = std::uint64_t{256} << 20;

std::string host_name() {
  std::string name(256, '\0');
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  name.resize(name.find('\0'));
  return name;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::uint64_t random_epoch() {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return number == 0 ? 1 : number;
}

void check_options(const JoinOptions& options) {
  check_name(options.name, "the worker's name");
  if (options.world_size < 1) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("world_size is {}; expected is 1 or more", options.world_size));
  }
  if (options.rank < 0 || options.rank >= options.world_size) {
    throw Error(ErrorKind::kInvalid, fmt::format("rank is {}; in a world of {} expected is 0 to {}",
                                                 options.rank, options.world_size, options.world_size - 1));
  }
}

Member make_self(const JoinOptions& options) {
  Member self;
  self.name = options.name;
  self.rank = options.rank;
  self.address = options.address;
  self.epoch = options.epoch != 0 ? options.epoch : random_epoch();
  self.host = host_name();
  self.host_id = boot_id();
  self.pid = getpid();
  self.uid = geteuid();
  self.functions_digest = options.functions_digest;
  return self;
}

}  // namespace

std::string describe(const Member& member) {
  return fmt::format("{} (rank {}, pid {} on {})", member.name, member.rank, member.pid, member.host);
}

TransportFactory stream_transports(Executor& executor, net::Secret secret) {
  return [&executor, secret = std::move(secret)](const std::string&, net::Handler& handler) {
    net::TransportOptions options;
    options.secret = secret;
    options.max_header = kMostMessageBytes;
    options.max_message = kMostMessageBytes;
    options.max_segments = 0;
    options.max_unsent = 2 * kMostMessageBytes;
    return net::make_stream_transport(executor, handler, std::move(options));
  };
}

/// `client` and `server` are null in a world of one; `server` is rank 0's, and outlives its client.
class Membership::Impl {
 public:
  Impl(Runtime& runtime, const TransportFactory& transports, JoinOptions options)
      : runtime_(runtime), self_(make_self(options)) {
    if (options.world_size == 1) {
      members_ = {self_};
      return;
    }
    if (options.rank == 0) {
      server_ = std::make_unique<StoreServer>(runtime, transports, options.store_address,
                                              StoreOptions{options.world_size, options.job});
    }
    client_ = std::make_unique<Client>(runtime, transports, std::move(options), self_);
    try {
      members_ = client_->join();
    } catch (...) {
      client_.reset();
      if (server_) server_->finish(runtime.executor.deadline_in(kBadNewsTime));
      throw;
    }
  }

  std::vector<Bytes> gather(const std::string& what, const std::string& tag, BytesView mine,
                            std::vector<int> ranks, Deadline deadline) {
    const TimePoint began = runtime_.executor.now();
    try {
      check_ranks(ranks);
      check_name(tag, "the tag");
      if (mine.size() > kMostGatherBytes) {
        throw Error(ErrorKind::kInvalid,
                    fmt::format("{} bytes are more than the {} that a worker may contribute", mine.size(),
                                kMostGatherBytes));
      }
      refuse_in_callbacks();
      if (!client_) {
        if (left_) throw Error(ErrorKind::kCancelled, "this worker has left the world");
        return {Bytes(mine.begin(), mine.end())};
      }
      return client_->gather(tag, mine, std::move(ranks), deadline);
    } catch (const Error& error) {
      throw Error(error)
          .with_call(fmt::format("{} '{}'", what, tag))
          .with_elapsed(runtime_.executor.now() - began);
    }
  }

  void leave(Deadline deadline) {
    refuse_in_callbacks();
    if (left_.exchange(true) || !client_) return;
    client_->leave(deadline);
    if (!server_) return;
    const std::string others = server_->finish(deadline);
    server_.reset();
    if (!others.empty()) {
      runtime_.log.warning(fmt::format("rank 0 ended its store before these had left: {}", others));
    }
  }

  bool is_present(int rank) const {
    check_rank(rank);
    return client_ ? client_->is_present(rank) : true;
  }

  void check_rank(int rank) const {
    if (rank >= 0 && rank < static_cast<int>(members_.size())) return;
    throw Error(ErrorKind::kInvalid, fmt::format("there is no rank {} in this world; ranks go from 0 to {}",
                                                 rank, members_.size() - 1));
  }

  const Member& member(std::string_view name) const {
    std::vector<std::string> names;
    for (const Member& member : members_) {
      if (member.name == name) return member;
      names.push_back(member.name);
    }
    throw Error(ErrorKind::kInvalid, fmt::format("there is no worker '{}' in this world; there are {}", name,
                                                 fmt::join(names, ", ")));
  }

  const Member& self() const { return self_; }
  const std::vector<Member>& members() const { return members_; }
  Client* client() const { return client_.get(); }

 private:
  /// Empty means everybody; else ascending, without doubles, ours among them.
  void check_ranks(std::vector<int>& ranks) const {
    if (ranks.empty()) {
      for (const Member& member : members_) ranks.push_back(member.rank);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    for (const int rank : ranks) check_rank(rank);
    if (!std::binary_search(ranks.begin(), ranks.end(), self_.rank)) {
      throw Error(
          ErrorKind::kInvalid,
          fmt::format("this worker (rank {}) is not among the ranks {} that take part", self_.rank, ranks));
    }
  }

  void refuse_in_callbacks() const {
    if (!client_ || !client_->is_callback_thread()) return;
    throw Error(ErrorKind::kInvalid,
                "a membership callback must not wait for the membership: hand the work to another thread");
  }

  Runtime& runtime_;
  const Member self_;
  std::vector<Member> members_;
  std::atomic<bool> left_{false};
  std::unique_ptr<StoreServer> server_;
  std::unique_ptr<Client> client_;
};

Membership::Membership(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Membership::~Membership() = default;

std::unique_ptr<Membership> Membership::join(Runtime& runtime, TransportFactory transports,
                                             JoinOptions options) {
  check_options(options);
  const std::string who = options.name;
  try {
    auto impl = std::make_unique<Impl>(runtime, transports, std::move(options));
    return std::unique_ptr<Membership>(new Membership(std::move(impl)));
  } catch (const Error& error) {
    throw Error(error).with_worker(who).with_call("join");
  }
}

const Member& Membership::self() const { return impl_->self(); }
const std::vector<Member>& Membership::members() const { return impl_->members(); }
const Member& Membership::member(std::string_view name) const { return impl_->member(name); }

const Member& Membership::member(int rank) const {
  impl_->check_rank(rank);
  return members()[static_cast<std::size_t>(rank)];
}

bool Membership::is_present(int rank) const { return impl_->is_present(rank); }

void Membership::on_death(DeathCallback callback) {
  if (impl_->client() != nullptr) impl_->client()->on_death(std::move(callback));
}

void Membership::on_departure(DepartureCallback callback) {
  if (impl_->client() != nullptr) impl_->client()->on_departure(std::move(callback));
}

void Membership::barrier(const std::string& tag, std::vector<int> ranks, Deadline deadline) {
  impl_->gather("barrier", tag, {}, std::move(ranks), deadline);
}

std::vector<Bytes> Membership::all_gather(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                          Deadline deadline) {
  return impl_->gather("all_gather", tag, mine, std::move(ranks), deadline);
}

void Membership::leave(Deadline deadline) { impl_->leave(deadline); }

}  // namespace torchspan::rendezvous
