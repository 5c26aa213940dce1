#include "net/tls/tls_dialer.h"

#include <algorithm>
#include <fmt/format.h>

#include "net/stream/socket.h"

namespace torchspan::net {

TlsDialer::TlsDialer(const DriverContext& driver, std::shared_ptr<const TlsContext> context, TlsLanes& lanes)
    : driver_(driver), context_(std::move(context)), lanes_(lanes) {}

template <class Dialing>
auto TlsDialer::explained(const TlsLink& link, const Dialing& dialing) const {
  const Address& address = link.addresses.at(link.address);
  try {
    return dialing(address);
  } catch (const Error& error) {
    throw Error(error.kind(), error.message() + loopback_hint(link.place, address));
  }
}

void TlsDialer::dial_first(TlsLane& lane) {
  try {
    start(lane);
  } catch (const Error& failure) {
    if (!redial(lane, failure)) throw with_earlier(lane, failure);
  }
}

void TlsDialer::dial_rest(const std::shared_ptr<TlsLink>& link) {
  for (std::uint8_t number = 1; number <= link->granted; ++number) {
    TlsLane& lane = lanes_.add(
        std::make_unique<TlsLane>(driver_.tokens.next(), Role::kDialer, link->channel()->peer(), number),
        link);
    try {
      start(lane);
    } catch (const Error&) {
      lanes_.drop(lane);
    }
  }
}

bool TlsDialer::redial(TlsLane& lane, const Error& failure) {
  TlsLink& link = *lane.link;
  if (!lane.first() || lane.stage() > TlsLane::Stage::kConnecting) return false;
  link.failures.push_back(failure.message());
  while (link.address + 1 < link.addresses.size()) {
    lanes_.unwatch(lane);
    ++link.address;
    try {
      start(lane);
      return true;
    } catch (const Error& next) {
      link.failures.push_back(next.message());
    }
  }
  return false;
}

Error TlsDialer::with_earlier(const TlsLane& lane, const Error& failure) {
  std::vector<std::string> all;
  if (lane.link) all = lane.link->failures;
  if (std::ranges::find(all, failure.message()) == all.end()) all.push_back(failure.message());
  return Error(failure.kind(), fmt::format("{}", fmt::join(all, "; ")));
}

void TlsDialer::start(TlsLane& lane) {
  const TlsLink& link = *lane.link;
  Dialed dialed = explained(link, [](const Address& address) { return dial(address); });
  auto session = std::make_shared<TlsSession>(
      context_, std::move(dialed.socket),
      TlsSession::Start{.role = Role::kDialer, .peer = lane.peer(), .host = link.place.host});
  lane.start(std::move(session), dialed.connected);
  lanes_.watch(lane, true);
}

void TlsDialer::finish(TlsLane& lane) const {
  explained(*lane.link, [&](const Address& address) { finish_dial(lane.session()->socket(), address); });
  lane.connected();
}

}  // namespace torchspan::net
