#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <ostream>
#include <string>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net::conformance {

/// The secret of every authenticated peer in the suite.
Secret common_secret();
TransportOptions honest_options();

/// TlsOptions::dead_after of all peers: no busy machine stops one of them for so long.
inline constexpr Duration kLongSilence = std::chrono::minutes(1);

/// A peer that connects to a worker without knowing the protocol.
class UnauthenticatedPeer {
 public:
  virtual ~UnauthenticatedPeer() = default;
  /// Connects and sends `bytes`, which may be empty. Connections are made in the order of these calls.
  virtual void dial(const std::string& address, BytesView bytes) = 0;
  virtual void send(BytesView bytes) = 0;
  /// Waits until the worker closes the connection; returns false if it did not within half a minute.
  virtual bool sees_hang_up() = 0;
};

/// A peer that sends every message back, possibly in a separate process.
class EchoPeer {
 public:
  virtual ~EchoPeer() = default;
  virtual std::string address() const = 0;
  /// Dies without a message, as a killed process does. Call it once.
  virtual void kill() = 0;
  /// Stops the peer until go_on(), as SIGSTOP does. Returns false if this one cannot be stopped.
  virtual bool stop() { return false; }
  virtual void go_on() {}
  /// Forks a child that outlives kill() and ends with this object. Returns false if this one cannot fork.
  virtual bool fork_child() { return false; }
};

/// The environment of one test on one transport.
class World {
 public:
  virtual ~World() = default;
  virtual Executor& executor() = 0;
  virtual std::unique_ptr<Transport> make_transport(const std::string& name, Handler& handler,
                                                    TransportOptions options) = 0;
  /// An address at which the transport made under `name` can listen.
  virtual std::string listen_address(const std::string& name) = 0;
  /// A valid address at which no worker listens.
  virtual std::string unused_address() = 0;
  /// The name that errors use for the peer that was dialed at `address`.
  virtual std::string named(const std::string& address) { return address; }
  virtual std::unique_ptr<UnauthenticatedPeer> make_unauthenticated_peer() = 0;
  /// The first bytes of an authenticated dialer: too few to distinguish it from other peers.
  virtual std::string greeting_start() { return "\x89TSPAN"; }
  /// Whether EchoPeer::kill() takes effect at once, like the end of a process, and must be reported at once.
  virtual bool dies_at_once() const { return true; }
  /// Whether a peer that is silent for TlsOptions::dead_after counts as dead.
  virtual bool silence_is_death() const { return false; }
  /// TlsOptions::dead_after of the transports that are made in this process from now on. Returns false if they have none.
  virtual bool set_dead_after(Duration) { return false; }
  /// Starts an echo at listen_address(name). The same name again after kill() starts its replacement.
  virtual std::unique_ptr<EchoPeer> start_echo(const std::string& name) = 0;
};

/// One row of the suite: runs a test's body in a new world, on a thread that may wait through its executor.
struct Backend {
  std::string name;
  std::function<void(const std::function<void(World&)>& body)> run;
  friend std::ostream& operator<<(std::ostream& out, const Backend& backend) { return out << backend.name; }
};

/// Two peers in this process, tested from both sides. A new transport instantiates it.
class TransportConformance : public ::testing::TestWithParam<Backend> {
 protected:
  void in_world(const std::function<void(World&)>& body) const { GetParam().run(body); }
};

/// A peer that is tested only from outside: in this process, or in another.
class TransportPeerConformance : public TransportConformance {};

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

}  // namespace torchspan::net::conformance
