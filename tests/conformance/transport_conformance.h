#pragma once
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <ostream>
#include <string>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net::conformance {

/// The secret of every honest peer in the suite.
Secret common_secret();
TransportOptions honest_options();

/// Somebody who dials a worker without knowing how to behave.
class Stranger {
 public:
  virtual ~Stranger() = default;
  /// Dials and says `bytes`, which may be none. Who dials later comes later.
  virtual void dial(const std::string& address, BytesView bytes) = 0;
  virtual void send(BytesView bytes) = 0;
  /// Waits until the worker hangs up; false when it did not within half a minute.
  virtual bool hears_hang_up() = 0;
};

/// A peer that sends every message back, perhaps in a process of its own.
class EchoPeer {
 public:
  virtual ~EchoPeer() = default;
  virtual std::string address() const = 0;
  /// Dies without a word, as a killed process does. Once.
  virtual void kill() = 0;
  /// Stops it where it is, as SIGSTOP does, until go_on(). False when this one cannot be stopped.
  virtual bool stop() { return false; }
  virtual void go_on() {}
  /// Forks a child that lives on after kill(), as long as this object. False when this one cannot fork.
  virtual bool fork_child() { return false; }
};

/// The surroundings of one test on one back end.
class World {
 public:
  virtual ~World() = default;
  virtual Executor& executor() = 0;
  virtual std::unique_ptr<Transport> make_transport(const std::string& name, Handler& handler,
                                                    TransportOptions options) = 0;
  /// What the transport made under `name` can listen at.
  virtual std::string listen_address(const std::string& name) = 0;
  /// A good address at which no worker listens.
  virtual std::string deserted_address() = 0;
  /// What errors call the peer that was dialled at `address`.
  virtual std::string named(const std::string& address) { return address; }
  virtual std::unique_ptr<Stranger> make_unauthenticated_peer() = 0;
  /// How an honest dialer's first bytes begin: not enough to tell him from a stranger.
  virtual std::string greeting_start() { return "\x89TSPAN"; }
  /// Whether EchoPeer::kill() is over at once, as the end of a process is, so that its report has to be.
  virtual bool dies_at_once() const { return true; }
  /// Whether a peer that says nothing for five seconds counts as dead.
  virtual bool silence_is_death() const { return false; }
  /// An echo at listen_address(name). Of the same name again after kill(): it came back.
  virtual std::unique_ptr<EchoPeer> start_echo(const std::string& name) = 0;
};

/// One row of the suite: runs a test's body in a fresh world, on a thread that may wait through its executor.
struct Backend {
  std::string name;
  std::function<void(const std::function<void(World&)>& body)> run;
  friend std::ostream& operator<<(std::ostream& out, const Backend& backend) { return out << backend.name; }
};

/// Two peers in this process, seen from both sides. A new transport instantiates it.
class TransportConformance : public ::testing::TestWithParam<Backend> {
 protected:
  void in_world(const std::function<void(World&)>& body) const { GetParam().run(body); }
};

/// A peer that is only seen from outside: in this process, or in another.
class TransportPeerConformance : public TransportConformance {};

inline std::string backend_name(const ::testing::TestParamInfo<Backend>& info) { return info.param.name; }

}  // namespace torchspan::net::conformance
