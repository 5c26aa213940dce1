#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>

#include "net/stream/socket.h"

namespace torchspan::net {

/// A parsed address: "scheme:host:port".
struct TlsPlace {
  std::string text;
  std::string host;  ///< a name, or an address without brackets
  std::uint16_t port;
};

/// Throws kInvalid for any other text.
TlsPlace parse_tls_address(const std::string& text, std::string_view scheme = "tls");

/// The address, if the host is not a name.
std::optional<Address> numeric_address(const TlsPlace& place);

/// All addresses of the host, in the system's order of preference. Uses the system's resolver, which may be
/// slow. Throws kDisconnected if it finds none.
std::vector<Address> look_up(const TlsPlace& place);

/// What is wrong if the host's name means this host only, although it is to name another one: text to append to
/// an error. Empty for other addresses, and for hosts that are not names.
std::string loopback_hint(const TlsPlace& place, const Address& address);

/// The text of `place` with another port.
std::string with_port(const TlsPlace& place, std::uint16_t port);

/// Looks up host names on separate threads, because the system's resolver may take many seconds. Thread-safe.
/// The destructor waits for running look-ups.
class Resolver {
 public:
  struct Answer {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  explicit Resolver(Executor& executor) : executor_(executor) {}

  /// Calls `done` once, on the thread of the look-up. Throws kOverloaded if no thread can be started.
  void look_up(TlsPlace place, std::function<void(Answer)> done);

 private:
  struct LookUp {
    std::atomic<bool> finished{false};
    Thread thread;
  };

  Executor& executor_;
  Mutex mutex_;
  std::list<LookUp> running_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::net
