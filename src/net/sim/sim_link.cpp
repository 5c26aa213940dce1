#include "net/sim/sim_link.h"

#include <algorithm>

namespace torchspan::net {

std::size_t Packet::size() const {
  if (copied || kind != Kind::kMessage) return 0;
  std::size_t size = header.size();
  for (const Bytes& segment : segments) size += segment.size();
  return size;
}

std::vector<Packet> SimLink::take_due(TimePoint now, bool reorder) {
  std::vector<Packet> due;
  for (auto packet = packets.begin(); packet != packets.end();) {
    const bool overtakes = packet != packets.begin();
    const bool message = packet->kind == Packet::Kind::kMessage;
    // Only messages overtake, and only messages are overtaken.
    if (overtakes && (!reorder || !message)) break;
    if (!packet->held && packet->due <= now) {
      due.push_back(std::move(*packet));
      packet = packets.erase(packet);
    } else if (message) {
      ++packet;
    } else {
      break;
    }
  }
  std::ranges::stable_sort(due, {}, [&](const Packet& packet) { return reorder ? packet.due : TimePoint{}; });
  return due;
}

}  // namespace torchspan::net
