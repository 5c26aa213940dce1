#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <string>

#include "net/api/network.h"
#include "net/stream/driver_context.h"

namespace torchspan::net {

/// A parsed address of the network transport: "unix:/path@mark,tls:host:port". Either half may be missing,
/// and so may the mark in addresses to listen at; "ucx:" may replace "tls:".
struct NetworkPlace {
  std::string near;  ///< "unix:/path", or empty
  std::string mark;  ///< the host of `near`
  std::string far;   ///< "tls:host:port", "ucx:host:port", or empty

  std::string text() const;
};

/// Throws kInvalid for any other text. The transport of each half parses that half.
NetworkPlace parse_network_place(const std::string& text);

/// The boot id of this machine; empty if the system does not provide it.
std::string boot_mark();

/// Combines two transports: `near_` for this host, `far_` for others. Channels and callbacks are theirs;
/// poll() drives one after the other, so callbacks run one at a time.
class NetworkTransport final : public Transport {
 public:
  NetworkTransport(Executor& executor, std::unique_ptr<PolledTransport> near,
                   std::unique_ptr<PolledTransport> far, std::string mark);

  std::string listen(const std::string& address) override;
  bool can_reach(const std::string& address) const override;
  std::shared_ptr<Channel> connect(const std::string& address, Deadline deadline) override;
  bool poll() override;
  void wait(Deadline deadline) override;
  void wake() override;

 private:
  bool is_here(const NetworkPlace& place) const;

  const std::string mark_;
  const std::unique_ptr<Poller> poller_;
  const std::array<std::unique_ptr<PolledTransport>, 2> parts_;
  PolledTransport& near_;
  PolledTransport& far_;
  std::atomic<bool> woken_{false};
};

}  // namespace torchspan::net
