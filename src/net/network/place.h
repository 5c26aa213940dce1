#pragma once
#include <string>

namespace torchspan::net {

/// An address of the network transport, taken apart: "unix:/path@mark,tls:host:port", where either half may
/// be missing, and the mark in addresses to listen at; "ucx:" may stand for "tls:".
struct NetworkPlace {
  std::string near;  ///< "unix:/path", or empty
  std::string mark;  ///< of the host where `near` is
  std::string far;   ///< "tls:host:port", "ucx:host:port", or empty

  std::string text() const;
};

/// Throws kInvalid for what is no such address. The halves themselves are read by the transports they belong
/// to.
NetworkPlace parse_network_place(const std::string& text);

/// This boot of this machine; empty when the system does not tell.
std::string boot_mark();

}  // namespace torchspan::net
