#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <sys/types.h>
#include <vector>

#include <torchspan/detail/rendezvous/membership.h>

#include "core/api/descriptor.h"
#include "net/api/tls.h"
#include "net/stream/socket.h"
#include "tests/conformance/transport_node.h"
#include "tests/security/unauthenticated_counts.h"
#include "tests/support/certificates.h"
#include "tests/support/processes.h"

/// A listener that unauthenticated peers can reach, in a separate process that the test observes from
/// outside.
namespace torchspan::net::conformance {

struct ListenerKind {
  std::string name;
  std::string transport;  ///< of unauthenticated_victim
  bool store = false;     ///< rank 0's store, instead of an echo
  bool unix_socket = false;
  bool certificates = false;
  friend std::ostream& operator<<(std::ostream& out, const ListenerKind& kind) { return out << kind.name; }
};

/// An authenticated peer. Fails the test if the answer differs from what was sent.
class Honest {
 public:
  virtual ~Honest() = default;
  /// Exchanges one message, with the victim or with the others of the world. Returns false when the
  /// connection has ended.
  virtual bool exchange() = 0;
  /// Why the last exchange() returned false.
  virtual std::string why() const = 0;
};

/// The counts that the victim has reported so far.
struct Counts {
  std::uint64_t accepted, refused, denied, overloaded;
};

/// The victim, and all ways to connect to it.
class AttackedListener {
 public:
  /// `descriptors`: how many files the victim may open; 0 for the default.
  explicit AttackedListener(ListenerKind kind, int descriptors = 0);
  ~AttackedListener();
  const ListenerKind& kind() const { return kind_; }
  Executor& executor() { return *executor_; }
  const std::string& address() const { return address_; }
  bool is_tls() const { return kind_.transport == "tls"; }

  bool alive() const;
  std::size_t open_files() const;
  std::size_t resident_bytes() const;
  /// User and system time that the victim has used.
  Duration cpu_time() const;
  Counts counts();
  void send_signal(int signal) const;

  /// A socket that connects without waiting; empty while the system accepts no more. `to` replaces the
  /// victim's address.
  Descriptor dial() const;
  Address parsed(const std::string& address) const;
  /// The first bytes of a peer that connects as this listener expects but has another secret.
  Bytes opening() const;
  /// A transport that this listener accepts, or one with another secret.
  std::unique_ptr<Transport> make_transport(Handler& handler, TransportOptions options) const;
  TlsOptions tls_options(bool ours) const;
  /// An authenticated peer that connects to `address` (the victim's if empty) until it is accepted; null if
  /// that takes too long.
  std::unique_ptr<Honest> make_honest(const std::string& address = {});
  /// An address at which another listener of this kind may listen.
  std::string other_address(const std::string& name) const;

 private:
  const ListenerKind kind_;
  const torchspan::testing::TemporaryFolder folder_;
  mutable std::vector<ReservedPort> ports_;  ///< of other addresses
  const std::unique_ptr<Executor> executor_ = make_executor();
  std::unique_ptr<torchspan::testing::TestAuthority> ours_, foreign_;
  Descriptor to_victim_, from_victim_;
  pid_t victim_ = 0;
  std::string address_;
  int members_ = 0;
};

}  // namespace torchspan::net::conformance
