#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/net/transport.h>

#include "core/api/rate_limited_warning.h"
#include "core/api/timeout_notice.h"
#include "rendezvous/store/store.h"

namespace torchspan::rendezvous {

/// Serves a Store on its own transport and thread; only that thread uses them.
class StoreServer final : private net::Handler {
 public:
  /// Listens at once. Throws kInvalid, with advice, if the address is in use.
  StoreServer(Runtime& runtime, const TransportFactory& transports, const std::string& address,
              StoreOptions options);
  /// Stops at once: for clients that are still connected, their store dies.
  ~StoreServer() override;

  /// Where it listens.
  const std::string& address() const { return address_; }
  /// Serves until no worker needs the store, at most until the deadline. Returns the names of the workers
  /// that were still present then.
  std::string finish(Deadline deadline);

 private:
  /// For workers that join or leave.
  struct Awaiting {
    TimePoint began;
    WaitWarnings warnings = {};
  };
  void warn_of_awaited(std::optional<Awaiting>& wait);
  void serve();
  void send(ConnectionId connection, const SharedBytes& message);
  void on_accepted(const std::shared_ptr<net::Channel>& channel) override;
  void on_message(const std::shared_ptr<net::Channel>& channel, net::Message message) override;
  void on_closed(const std::shared_ptr<net::Channel>& channel, const Error& reason) override;
  void on_refused(const std::string& peer, const Error& reason) override;

  Runtime& runtime_;
  RateLimitedWarning refusals_;
  RateLimitedWarning malformed_;
  Store store_;
  std::map<ConnectionId, std::shared_ptr<net::Channel>> channels_;
  std::map<const net::Channel*, ConnectionId> connections_;
  ConnectionId next_connection_ = 1;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> finishing_{false};
  std::unique_ptr<Parker> finished_;
  Mutex mutex_;
  std::string left_behind_ TORCHSPAN_GUARDED_BY(mutex_);
  std::unique_ptr<net::Transport> transport_;
  const std::string address_;
  Thread thread_;
};

}  // namespace torchspan::rendezvous
