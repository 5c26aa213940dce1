#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "net/stream/address.h"

namespace torchspan::net {

/// "scheme:host:port", read and checked.
struct TlsPlace {
  std::string text;
  std::string host;  ///< a name, or an address without brackets
  std::uint16_t port;
};

/// Throws kInvalid for what is no such address.
TlsPlace parse_tls_address(const std::string& text, std::string_view scheme = "tls");

/// The address, if the host is one and not a name.
std::optional<Address> numeric_address(const TlsPlace& place);

/// All addresses of the host, in the system's order of preference. Asks the system's resolver and may take
/// long. Throws kDisconnected when it knows none.
std::vector<Address> look_up(const TlsPlace& place);

/// `place` with another port, as peers write it.
std::string with_port(const TlsPlace& place, std::uint16_t port);

}  // namespace torchspan::net
