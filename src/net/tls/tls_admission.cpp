#include "net/tls/tls_admission.h"

#include <algorithm>
#include <fmt/format.h>
#include <openssl/rand.h>

namespace torchspan::net {
namespace {

ChannelToken draw_channel_token() {
  ChannelToken token;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(token.data()), static_cast<int>(token.size())) != 1) {
    throw Error(ErrorKind::kUnsupported,
                "the system's random source returned no bytes for a channel's token");
  }
  return token;
}

}  // namespace

TlsAdmission::TlsAdmission(const TlsOptions& tls, TlsLanes& lanes, TlsLinks& links, TlsDialer& dialer)
    : most_lanes_(static_cast<std::uint8_t>(tls.lanes)),
      features_(tls.network == TcpNetwork::kIsolated ? kSendsUnencrypted : 0),
      lanes_(lanes),
      links_(links),
      dialer_(dialer) {}

LaneHello TlsAdmission::greeting_of(const TlsLane& lane) const {
  LaneHello hello{.features = features_};
  if (lane.role() == Role::kListener) return hello;
  hello.lanes = most_lanes_;
  hello.lane = lane.number();
  if (!lane.first()) hello.token = lane.link->shared_token;
  return hello;
}

void TlsAdmission::meet(TlsLane& lane, const LaneHello& hello) {
  if (lane.role() == Role::kDialer) return take_answer(lane, hello);
  hello.lane == 0 ? accept_first(lane, hello) : accept_further(lane, hello);
}

void TlsAdmission::accept_first(TlsLane& lane, const LaneHello& hello) {
  LaneHello answer{.lanes = std::min(hello.lanes, most_lanes_), .features = features_};
  answer.token = draw_channel_token();
  lane.say(answer);
  check_agreement(answer, hello, lane.peer());
  links_.open(lane, links_.add_accepted(lane, answer));
}

void TlsAdmission::accept_further(TlsLane& lane, const LaneHello& hello) {
  const auto link = links_.find_accepted(hello.token);
  if (!link || hello.lane > link->granted || lanes_.has_number(*link, hello.lane)) {
    // Most likely its channel has just ended.
    throw Error(ErrorKind::kDisconnected,
                fmt::format("'{}' asked to join a channel that does not exist (any more)", lane.peer()));
  }
  const LaneHello answer{.lane = hello.lane, .features = features_, .token = hello.token};
  lane.say(answer);
  check_agreement(answer, hello, lane.peer());
  link->lanes.push_back(lane.token());
  join(lane, link, hello.lane);
}

void TlsAdmission::take_answer(TlsLane& lane, const LaneHello& hello) {
  const auto link = lane.link;
  if (hello.lane != lane.number() || (!lane.first() && hello.token != link->shared_token)) {
    throw Error(ErrorKind::kInvalid, fmt::format("'{}' answered for another connection", lane.peer()));
  }
  if (!lane.first()) return join(lane, link, lane.number());
  link->shared_token = hello.token;
  link->granted = std::min(hello.lanes, most_lanes_);
  links_.open(lane, link);
  dialer_.dial_rest(link);
}

void TlsAdmission::join(TlsLane& lane, const std::shared_ptr<TlsLink>& link, std::uint8_t number) {
  lanes_.end_handshake(lane);
  lane.join(link, number);
}

}  // namespace torchspan::net
