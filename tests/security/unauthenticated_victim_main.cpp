#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/resource.h>
#include <unistd.h>

#include <torchspan/detail/rendezvous/membership.h>

#include "net/api/local.h"
#include "net/api/stream.h"
#include "net/api/tls.h"
#include "tests/conformance/transport_echo.h"
#include "tests/security/unauthenticated_counts.h"

/// unauthenticated_victim stream|local|tls ADDRESS [CERTIFICATE KEY AUTHORITY]: echoes at ADDRESS; with the
/// prefix "store-" it is rank 0 of an open world and serves its store there. TORCHSPAN_TEST_DESCRIPTORS
/// limits the files that it may open. Prints its address, then a line of counts for every byte on its
/// standard input.
namespace torchspan::net::conformance {
namespace {

/// Counts the events that pass through it.
class Counting final : public Handler {
 public:
  explicit Counting(Handler& inner, VictimCounts& counts) : inner_(inner), counts_(counts) {}
  void on_accepted(const std::shared_ptr<Channel>& channel) override {
    ++counts_.accepted;
    inner_.on_accepted(channel);
  }
  void on_message(const std::shared_ptr<Channel>& channel, Message message) override {
    inner_.on_message(channel, std::move(message));
  }
  void on_closed(const std::shared_ptr<Channel>& channel, const Error& reason) override {
    inner_.on_closed(channel, reason);
  }
  void on_refused(const std::string& peer, const Error& reason) override {
    ++counts_.refused;
    if (reason.kind() == ErrorKind::kDenied) ++counts_.denied;
    if (reason.kind() == ErrorKind::kOverloaded) ++counts_.overloaded;
    inner_.on_refused(peer, reason);
  }

 private:
  Handler& inner_;
  VictimCounts& counts_;
};

/// A transport that owns the handler it was made for.
class Counted final : public Transport {
 public:
  Counted(std::unique_ptr<Counting> handler, std::unique_ptr<Transport> inner)
      : handler_(std::move(handler)), inner_(std::move(inner)) {}
  std::string listen(const std::string& address) override { return inner_->listen(address); }
  bool can_reach(const std::string& address) const override { return inner_->can_reach(address); }
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override {
    return inner_->connect(address, deadline);
  }
  bool poll() override { return inner_->poll(); }
  void wait(Deadline deadline) override { inner_->wait(deadline); }
  void wake() override { inner_->wake(); }

 private:
  const std::unique_ptr<Counting> handler_;
  const std::unique_ptr<Transport> inner_;
};

class VictimWorld final : public World {
 public:
  VictimWorld(std::string kind, std::string address, TlsOptions tls)
      : kind_(std::move(kind)), address_(std::move(address)), tls_(std::move(tls)) {}
  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    options.handshake_timeout = kVictimPatience;
    auto counting = std::make_unique<Counting>(handler, counts);
    auto transport = make(*counting, std::move(options));
    return std::make_unique<Counted>(std::move(counting), std::move(transport));
  }
  std::string listen_address(const std::string&) override { return address_; }
  std::string unused_address() override { return {}; }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override { return nullptr; }
  std::unique_ptr<EchoPeer> start_echo(const std::string&) override { return nullptr; }

  VictimCounts counts;

 private:
  std::unique_ptr<Transport> make(Handler& handler, TransportOptions options) {
    if (kind_ == "local") return make_local_transport(*executor_, handler, std::move(options));
    if (kind_ == "tls") return make_tls_transport(*executor_, handler, std::move(options), tls_);
    return make_stream_transport(*executor_, handler, std::move(options));
  }

  const std::string kind_;
  const std::string address_;
  const TlsOptions tls_;
  const std::unique_ptr<Executor> executor_ = make_executor();
};

/// Answers until standard input ends.
void report(const VictimCounts& counts) {
  for (char c; ::read(STDIN_FILENO, &c, 1) > 0;) {
    std::printf("%llu %llu %llu %llu\n", static_cast<unsigned long long>(counts.accepted),
                static_cast<unsigned long long>(counts.refused),
                static_cast<unsigned long long>(counts.denied),
                static_cast<unsigned long long>(counts.overloaded));
    std::fflush(stdout);
  }
}

void announce(const std::string& address) {
  std::printf("%s\n", address.c_str());
  std::fflush(stdout);
}

void serve_echo(VictimWorld& world) {
  Node::Options options = echo_options();
  options.keep_parcels = false;
  options.keep_journal = false;
  Node node(world, "victim", std::move(options));
  announce(node.listen());
  report(world.counts);
}

void serve_store(VictimWorld& world) {
  Runtime runtime(world.executor(), "victim", LogLevel::kOff);
  rendezvous::MembershipOptions join;
  join.name = "victim";
  join.world_size = rendezvous::kOpenWorld;
  join.store_address = world.listen_address("");
  const auto membership = rendezvous::Membership::join(
      runtime,
      [&](const std::string& endpoint, Handler& handler) {
        return world.make_transport(endpoint, handler, honest_options());
      },
      join);
  announce(join.store_address);
  report(world.counts);
}

void limit_descriptors() {
  const char* most = std::getenv("TORCHSPAN_TEST_DESCRIPTORS");
  if (most == nullptr) return;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = static_cast<rlim_t>(std::atoi(most));
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) std::abort();
}

}  // namespace
}  // namespace torchspan::net::conformance

int main(int count, char** arguments) {
  using namespace torchspan::net::conformance;
  if (count != 3 && count != 6) return 2;
  torchspan::net::TlsOptions tls;
  if (count == 6) {
    tls.certificate_file = arguments[3];
    tls.key_file = arguments[4];
    tls.authority_file = arguments[5];
  }
  limit_descriptors();
  std::string kind = arguments[1];
  const bool store = kind.starts_with("store-");
  if (store) kind.erase(0, 6);
  VictimWorld world(kind, arguments[2], tls);
  store ? serve_store(world) : serve_echo(world);
  return 0;
}
