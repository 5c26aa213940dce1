#include <algorithm>
#include <map>

#include "net/api/tls.h"
#include "net/tls/tls_address.h"
#include "tests/conformance/transport_echo.h"
#include "tests/conformance/transport_sockets.h"
#include "tests/support/certificates.h"
#include "tests/support/processes.h"

/// The TLS transport's rows in the suite: by secret and by certificate, peers as threads and as processes,
/// with lanes and without, and without encryption.
namespace torchspan::net::conformance::transport_tls {
namespace {

enum class Proof { kSecret, kCertificate };

class TlsWorld final : public World {
 public:
  TlsWorld(Proof proof, Peers peers, TlsOptions tls) : proof_(proof), peers_(peers), tls_(std::move(tls)) {
    tls_.dead_after = kLongSilence;
    if (proof_ == Proof::kSecret) return;
    for (const auto* authority : {&ours_, &foreign_}) {
      (*authority)->issue("worker", "DNS:localhost,IP:127.0.0.1");
    }
  }

  Executor& executor() override { return *executor_; }
  std::unique_ptr<Transport> make_transport(const std::string&, Handler& handler,
                                            TransportOptions options) override {
    // A peer with another secret has a certificate of another authority.
    const bool is_ours = std::ranges::equal(options.secret.bytes(), common_secret().bytes());
    return make_tls_transport(*executor_, handler, options, tls_options(is_ours ? *ours_ : *foreign_));
  }
  std::string listen_address(const std::string& name) override {
    const auto known = echoes_.find(name);
    return known == echoes_.end() ? "tls:127.0.0.1:0" : known->second;
  }
  std::string unused_address() override { return reserve_port(reserved_, "tls"); }
  std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() override {
    return std::make_unique<UnauthenticatedSocketPeer>(
        [](const std::string& text) { return *numeric_address(parse_tls_address(text)); });
  }
  bool silence_is_death() const override { return true; }
  bool set_dead_after(Duration time) override {
    tls_.dead_after = time;
    return true;
  }
  std::string greeting_start() override { return {"\x16\x03\x01\x02\x00\x01", 6}; }
  std::unique_ptr<EchoPeer> start_echo(const std::string& name) override {
    std::unique_ptr<EchoPeer> echo;
    if (peers_ == Peers::kProcesses) {
      const bool isolated = tls_.network == TcpNetwork::kIsolated;
      std::vector<std::string> arguments = {isolated ? "tcp-isolated" : "tls", listen_address(name)};
      if (proof_ == Proof::kCertificate) {
        const TlsOptions tls = tls_options(*ours_);
        arguments.insert(arguments.end(), {tls.certificate_file, tls.key_file, tls.authority_file});
      }
      echo = std::make_unique<ProcessEcho>(std::move(arguments));
    } else {
      echo = std::make_unique<LocalEcho>(*this, name);
    }
    echoes_[name] = echo->address();
    return echo;
  }

 private:
  TlsOptions tls_options(const testing::TestAuthority& authority) const {
    TlsOptions tls = tls_;
    if (proof_ == Proof::kSecret) return tls;
    tls.certificate_file = authority.certificate_file("worker");
    tls.key_file = authority.key_file("worker");
    tls.authority_file = authority.authority_file();
    return tls;
  }

  const Proof proof_;
  const Peers peers_;
  TlsOptions tls_;
  const std::unique_ptr<Executor> executor_ = make_executor();
  const testing::TemporaryFolder folder_;
  const std::unique_ptr<testing::TestAuthority> ours_ =
      std::make_unique<testing::TestAuthority>(folder_.path(), "ours");
  const std::unique_ptr<testing::TestAuthority> foreign_ =
      std::make_unique<testing::TestAuthority>(folder_.path(), "foreign");
  Descriptor reserved_;
  std::map<std::string, std::string> echoes_;
};

Backend tls(const std::string& name, Proof proof, Peers peers, TlsOptions options = {}) {
  return {name, [=](const std::function<void(World&)>& body) {
            TlsWorld world(proof, peers, options);
            body(world);
          }};
}

constexpr TcpNetwork kIsolatedNetwork = TcpNetwork::kIsolated;
const Backend kSecret = tls("Secret", Proof::kSecret, Peers::kThreads);
const Backend kOneLane = tls("OneConnection", Proof::kSecret, Peers::kThreads, {.lanes = 0});
const Backend kCertificate = tls("Certificate", Proof::kCertificate, Peers::kThreads);
const Backend kPlain = tls("Isolated", Proof::kSecret, Peers::kThreads, {.network = kIsolatedNetwork});
const Backend kOnePlainLane =
    tls("OneIsolatedConnection", Proof::kSecret, Peers::kThreads, {.network = kIsolatedNetwork, .lanes = 0});
const Backend kSecretProcesses = tls("SecretProcesses", Proof::kSecret, Peers::kProcesses);
const Backend kCertificateProcesses = tls("CertificateProcesses", Proof::kCertificate, Peers::kProcesses);
const Backend kPlainProcesses =
    tls("IsolatedProcesses", Proof::kSecret, Peers::kProcesses, {.network = kIsolatedNetwork});

INSTANTIATE_TEST_SUITE_P(Tls, TransportConformance,
                         ::testing::Values(kSecret, kOneLane, kCertificate, kPlain, kOnePlainLane),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Tls, TransportPeerConformance,
                         ::testing::Values(kSecret, kCertificate, kPlain, kSecretProcesses,
                                           kCertificateProcesses, kPlainProcesses),
                         backend_name);

}  // namespace
}  // namespace torchspan::net::conformance::transport_tls
