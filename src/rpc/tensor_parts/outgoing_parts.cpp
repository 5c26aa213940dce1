#include "rpc/tensor_parts/outgoing_parts.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace torchspan::rpc {

SplitTensorPtr OutgoingParts::split(PeerId to, const at::Tensor& tensor, PartSender sender,
                                    const std::optional<SharedArea>& shared) {
  const std::size_t shared_part = shared ? SharedBuffers::part_of(*shared->area) : 0;
  const bool is_shared = shared_part != 0 && tensor.nbytes() >= shared_part;
  if (!is_shared && tensor.nbytes() < 2 * part_) return nullptr;
  SplitTensor::Route route{line_to(to, tensor.device(), is_shared ? shared : std::nullopt), sender, 0};
  {
    MutexLock lock(mutex_);
    route.number = ++last_number_;
  }
  if (!route.line || !route.line->enter(route.number)) return nullptr;
  const std::shared_ptr<PartLine> line = route.line;
  const std::uint64_t number = route.number;
  try {
    return std::make_shared<SplitTensor>(std::move(route), tensor, events_);
  } catch (...) {  // no memory on the device
    line->forget(number);
    throw;
  }
}

std::shared_ptr<PartLine> OutgoingParts::line_to(PeerId to, c10::Device device,
                                                 const std::optional<SharedArea>& shared) {
  MutexLock lock(mutex_);
  const auto departed = departed_.find(to.rank);
  if (departed != departed_.end() && to.incarnation <= departed->second) return nullptr;
  std::shared_ptr<PartLine>& line = lines_[{to, device.str(), shared ? shared->route : 0}];
  if (line) return line;
  PartLine::Count& alive = alive_[{to, device.str()}];
  if (!alive) alive = std::make_shared<std::atomic<std::size_t>>(0);
  std::unique_ptr<PartBuffers> buffers;
  if (shared) {
    buffers = std::make_unique<SharedBuffers>(device, *shared, is_open_);
  } else {
    buffers = std::make_unique<HostBuffers>(device, part_);
  }
  return line = std::make_shared<PartLine>(std::move(buffers), alive);
}

void OutgoingParts::departed(PeerId peer) {
  std::vector<std::shared_ptr<PartLine>> gone;  // freed without the lock
  MutexLock lock(mutex_);
  std::uint32_t& last = departed_.try_emplace(peer.rank, peer.incarnation).first->second;
  last = std::max(last, peer.incarnation);
  std::erase_if(alive_, [&](const auto& entry) { return entry.first.first == peer; });
  for (auto line = lines_.begin(); line != lines_.end();) {
    if (line->first.to != peer) {
      ++line;
      continue;
    }
    gone.push_back(std::move(line->second));
    line = lines_.erase(line);
  }
}

}  // namespace torchspan::rpc
