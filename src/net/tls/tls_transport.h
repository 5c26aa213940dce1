#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "net/api/tls.h"
#include "net/stream/driver_context.h"
#include "net/tls/tls_address.h"
#include "net/tls/tls_channel.h"
#include "net/tls/tls_driver.h"

namespace torchspan::net {

/// Transport over TLS 1.3 between hosts. Any thread listens and dials, by requests to the TlsDriver; poll() and
/// wait() belong to one thread at a time.
class TlsTransport final : public PolledTransport {
 public:
  /// Addresses begin with `scheme`, which another transport that is built on this one sets.
  TlsTransport(Executor& executor, Handler& handler, TransportOptions options, TlsOptions tls,
               std::string scheme = "tls");
  ~TlsTransport() override;

  std::string listen(const std::string& address) override;
  bool can_reach(const std::string& address) const override;
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override;
  bool prepare_sleep(Deadline& until) override;
  void end_sleep(bool ready) override;
  int descriptor() const override { return poller_->descriptor(); }

  /// What wait() sleeps on. A transport built on this one adds descriptors that end wait(), under tokens from
  /// kForeignTokens on.
  Poller& poller() { return *poller_; }
  static constexpr std::uint64_t kForeignTokens = std::uint64_t{1} << 63;

 private:
  bool must_poll_sockets() const;
  void resolve(const TlsPlace& place, std::uint64_t token);

  Executor& executor_;
  const TransportOptions options_;
  const std::string scheme_;
  const std::unique_ptr<Poller> poller_;
  const std::shared_ptr<TlsRequestQueue> request_queue_;
  TokenCounter tokens_;
  Timers timers_;
  const PortRange ports_;
  TlsDriver driver_;
  std::atomic<bool> woken_{false};
  std::size_t polls_ = 0;  ///< since the sockets were polled
  std::array<Poller::Event, 64> events_;
  std::size_t ready_ = 0;  ///< events that wait() left for poll()
  Resolver resolver_;
};

}  // namespace torchspan::net
