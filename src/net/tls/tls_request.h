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

/// A request of another thread to the TlsDriver.
struct TlsRequest {
  /// Make a channel by dialing `place`.
  struct Dial {
    std::shared_ptr<TlsChannel> channel;
    TlsPlace place;
    Deadline deadline;
    std::vector<Address> addresses;  ///< empty while the name is being looked up
  };
  /// The look-up of the host of the channel with this token has ended.
  struct Resolved {
    std::vector<Address> addresses;
    std::optional<Error> failure;
  };
  std::uint64_t token;
  std::optional<Dial> dial = {};
  std::optional<Resolved> resolved = {};
};

}  // namespace torchspan::net
