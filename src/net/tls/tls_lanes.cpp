#include "net/tls/tls_lanes.h"

#include <algorithm>

#include "net/tls/record_cipher.h"

namespace torchspan::net {
namespace {

/// Room for one record, so that none is copied twice.
constexpr std::size_t kTlsScratchBytes = kMostRecordBytes;

}  // namespace

TlsLanes::TlsLanes(const DriverContext& driver, Listener& listener)
    : driver_(driver),
      listener_(listener),
      scratch_(std::make_unique_for_overwrite<std::byte[]>(kTlsScratchBytes)) {}

TlsLane& TlsLanes::add(std::unique_ptr<TlsLane> owned, const std::shared_ptr<TlsLink>& link,
                       Deadline deadline) {
  TlsLane& lane = *owned;
  lanes_.emplace(lane.token(), std::move(owned));
  lane.link = link;
  if (link) link->lanes.push_back(lane.token());
  const Deadline latest = driver_.executor.deadline_in(driver_.options.handshake_timeout);
  driver_.timers.set(lane.token(), earlier(latest, deadline).at());
  return lane;
}

TlsLane* TlsLanes::find(std::uint64_t token) const {
  const auto found = lanes_.find(token);
  return found == lanes_.end() ? nullptr : found->second.get();
}

bool TlsLanes::have_all_ended(const TlsLink& link) const {
  return std::ranges::all_of(link.lanes, [&](std::uint64_t token) { return at(token).over; });
}

bool TlsLanes::has_number(const TlsLink& link, std::uint8_t number) const {
  return std::ranges::any_of(link.lanes, [&](std::uint64_t token) { return at(token).number() == number; });
}

void TlsLanes::end_handshake(const TlsLane& lane) {
  driver_.timers.set(lane.token(), std::nullopt);
  listener_.remove_unauthenticated(lane.token());
}

void TlsLanes::start_linger(const TlsLane& lane) {
  if (driver_.timers.of(lane.token())) return;
  driver_.timers.set(lane.token(), driver_.executor.now() + driver_.options.linger);
}

void TlsLanes::watch(TlsLane& lane, bool writing) {
  if (!lane.session()) return;
  writing |= lane.stage() == TlsLane::Stage::kConnecting;
  const bool wanted = !lane.over && (writing || lane.can_receive());
  const int socket = lane.session()->socket();
  if (wanted != lane.watched) {
    wanted ? driver_.poller.add(socket, lane.token(), writing) : driver_.poller.remove(socket);
  } else if (wanted && writing != lane.watches_writing) {
    driver_.poller.change(socket, lane.token(), writing);
  }
  lane.watched = wanted;
  lane.watches_writing = writing;
}

void TlsLanes::unwatch(TlsLane& lane) {
  if (lane.watched) driver_.poller.remove(lane.session()->socket());
  lane.watched = false;
}

bool TlsLanes::receive(TlsLane& lane) {
  return lane.receive({scratch_.get(), kTlsScratchBytes}, driver_.handler);
}

void TlsLanes::drop(TlsLane& lane) {
  end_handshake(lane);
  unwatch(lane);
  if (lane.link) std::erase(lane.link->lanes, lane.token());
  lanes_.erase(lane.token());
}

void TlsLanes::serve_resumed(const TlsLink& link) {
  // A lane that waited may have its bytes in memory already, which the poller does not report.
  for (const std::uint64_t token : link.lanes) {
    const TlsLane& lane = at(token);
    const bool waited = lane.last.waits || !lane.watched;  // the poller may watch it for writing
    if (lane.stage() == TlsLane::Stage::kOpen && waited && !lane.over && lane.can_receive()) {
      serve_again(lane);
    }
  }
}

}  // namespace torchspan::net
