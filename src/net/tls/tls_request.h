#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>

#include "net/tls/tls_address.h"
#include "net/tls/tls_channel.h"

namespace torchspan::net {

/// What another thread asks of the driver of a TLS transport.
struct TlsRequest {
  /// Make a channel by dialling `place`.
  struct Dial {
    std::shared_ptr<TlsChannel> channel;
    TlsPlace place;
    Deadline deadline;
    std::vector<Address> addresses;  ///< empty while the name is being looked up
    std::optional<Error> stillborn;
  };
  /// The host of the channel with this token is known, or never will be.
  struct Resolved {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  std::uint64_t token;
  std::optional<Dial> dial = {};
  std::optional<Resolved> resolved = {};
};

}  // namespace torchspan::net
