#include "net/tls/tls_address.h"

#include <cstring>
#include <fmt/format.h>
#include <memory>
#include <netdb.h>
#include <string_view>

#include <torchspan/core/error.h>

#include "core/api/parse_number.h"
#include "core/api/throw_invalid.h"

namespace torchspan::net {
namespace {

constexpr std::size_t kLongestName = 253;

[[noreturn]] void throw_unreadable(const std::string& text, std::string_view scheme, std::string_view why) {
  throw_invalid(
      "'{}' is not an address of this transport: {}; write {scheme}:host:port, {scheme}:10.0.0.1:port or "
      "{scheme}:[2001:db8::1]:port",
      text, why, fmt::arg("scheme", scheme));
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { ::freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

/// Zero and a list, or the resolver's error number.
int ask(const TlsPlace& place, int flags, AddressList& list) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(place.host.c_str(), std::to_string(place.port).c_str(), &hints, &found);
  if (failed == 0) list.reset(found);
  return failed;
}

std::vector<Address> addresses_of(const TlsPlace& place, const AddressList& list) {
  std::vector<Address> addresses;
  for (const addrinfo* one = list.get(); one != nullptr; one = one->ai_next) {
    if (one->ai_family != AF_INET && one->ai_family != AF_INET6) continue;
    Address& address = addresses.emplace_back(Address{.kind = Address::Kind::kTcp,
                                                      .text = place.text,
                                                      .path = {},
                                                      .port = place.port,
                                                      .socket = {},
                                                      .socket_size = one->ai_addrlen});
    std::memcpy(&address.socket, one->ai_addr, one->ai_addrlen);
  }
  return addresses;
}

}  // namespace

TlsPlace parse_tls_address(const std::string& text, std::string_view scheme) {
  if (!text.starts_with(scheme) || text.find(':') != scheme.size()) {
    throw_unreadable(text, scheme, fmt::format("it does not begin with {}:", scheme));
  }
  const std::string rest = text.substr(scheme.size() + 1);
  const std::size_t colon = rest.rfind(':');
  if (colon == std::string::npos) throw_unreadable(text, scheme, "the port is missing");
  const auto port = parse_number<std::uint16_t>(std::string_view(rest).substr(colon + 1));
  if (!port) throw_unreadable(text, scheme, "the port is not a number from 0 to 65535");
  std::string host = rest.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  if (host.empty()) throw_unreadable(text, scheme, "the host is missing");
  if (host.size() > kLongestName || host.find_first_of(std::string_view("[]/\0 ", 5)) != std::string::npos) {
    throw_unreadable(text, scheme, "the host is neither a name nor an address");
  }
  if (!bracketed && host.find(':') != std::string::npos) {
    throw_unreadable(text, scheme, "an IPv6 address needs brackets");
  }
  const TlsPlace place{text, std::move(host), *port};
  if (bracketed && !numeric_address(place))
    throw_unreadable(text, scheme, "the text in brackets is not an IPv6 address");
  return place;
}

std::optional<Address> numeric_address(const TlsPlace& place) {
  AddressList list;
  if (ask(place, AI_NUMERICHOST, list) != 0) return std::nullopt;
  const auto addresses = addresses_of(place, list);
  if (addresses.empty()) return std::nullopt;
  return addresses.front();
}

std::vector<Address> look_up(const TlsPlace& place) {
  AddressList list;
  const int failed = ask(place, 0, list);
  std::vector<Address> addresses = addresses_of(place, list);
  if (!addresses.empty()) return addresses;
  throw Error(ErrorKind::kDisconnected,
              fmt::format("the host name '{}'{} is not known here ({}): correct it, or try "
                          "getent hosts '{}'",
                          place.host, place.text == place.host ? "" : fmt::format(" of '{}'", place.text),
                          failed != 0 ? ::gai_strerror(failed) : "it has no internet address", place.host));
}

std::string loopback_hint(const TlsPlace& place, const Address& address) {
  const std::string text = tcp_text(address.socket);
  const bool is_loopback = text.starts_with("tcp:127.") || text.starts_with("tcp:[::1]");
  if (!is_loopback || place.host == "localhost" || numeric_address(place)) return {};
  const std::string numbers = text.substr(4, text.rfind(':') - 4);
  return fmt::format(
      "; here, '{}' is {}, which only this host reaches: correct /etc/hosts (getent hosts '{}'), "
      "or use the IP address of that host",
      place.host, numbers, place.host);
}

std::string with_port(const TlsPlace& place, std::uint16_t port) {
  return place.text.substr(0, place.text.rfind(':') + 1) + std::to_string(port);
}

void Resolver::look_up(TlsPlace place, std::function<void(Answer)> done) {
  MutexLock lock(mutex_);
  running_.remove_if([](const LookUp& one) { return one.finished.load(std::memory_order_acquire); });
  LookUp& one = running_.emplace_back();
  try {
    one.thread = executor_.spawn("look-up", [&one, place = std::move(place), done = std::move(done)] {
      Answer answer;
      try {
        answer.addresses = net::look_up(place);
      } catch (const Error& error) {
        answer.failure = error;
      }
      done(std::move(answer));
      one.finished.store(true, std::memory_order_release);
    });
  } catch (...) {
    running_.pop_back();
    throw;
  }
}

}  // namespace torchspan::net
