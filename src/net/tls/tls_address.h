#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/stream/address.h"

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

}  // namespace torchspan::net
