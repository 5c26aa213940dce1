#pragma once
#include <string>

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

}  // namespace torchspan::net
