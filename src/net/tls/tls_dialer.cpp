#include "net/tls/tls_dialer.h"

#include "net/stream/socket.h"

namespace torchspan::net {

TlsDialer::TlsDialer(const DriverContext& driver, std::shared_ptr<const TlsContext> context, TlsLanes& lanes)
    : driver_(driver), context_(std::move(context)), lanes_(lanes) {}

void TlsDialer::dial_first(TlsLane& lane) {
  try {
    start(lane);
  } catch (const Error&) {
    if (!redial(lane)) throw;
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

bool TlsDialer::redial(TlsLane& lane) {
  TlsLink& link = *lane.link;
  if (!lane.first() || lane.stage() > TlsLane::Stage::kConnecting) return false;
  while (link.address + 1 < link.addresses.size()) {
    lanes_.unwatch(lane);
    ++link.address;
    try {
      start(lane);
      return true;
    } catch (const Error&) {
    }
  }
  return false;
}

void TlsDialer::start(TlsLane& lane) {
  const TlsLink& link = *lane.link;
  Dialed dialed = dial(link.addresses.at(link.address));
  auto session = std::make_shared<TlsSession>(
      context_, std::move(dialed.socket),
      TlsSession::Start{.role = Role::kDialer, .peer = lane.peer(), .host = link.place.host});
  lane.start(std::move(session), dialed.connected);
  lanes_.watch(lane, true);
}

void TlsDialer::finish(TlsLane& lane) const {
  finish_dial(lane.session()->socket(), lane.link->addresses.at(lane.link->address));
  lane.connected();
}

}  // namespace torchspan::net
