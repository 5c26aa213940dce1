#include "rpc/tensor_parts/outgoing_parts.h"

#include <vector>

namespace torchspan::rpc {

SplitTensorPtr OutgoingParts::split(PeerId to, const at::Tensor& tensor, PartSender sender) {
  if (tensor.nbytes() < 2 * part_) return nullptr;
  SplitTensor::Way way{line_to(to, tensor.device()), sender, 0};
  {
    MutexLock lock(mutex_);
    way.number = ++last_number_;
  }
  if (!way.line->enter(way.number)) return nullptr;
  const std::shared_ptr<PartLine> line = way.line;
  const std::uint64_t number = way.number;
  try {
    return std::make_shared<SplitTensor>(std::move(way), tensor, events_);
  } catch (...) {  // no memory on the device
    line->forget(number);
    throw;
  }
}

std::shared_ptr<PartLine> OutgoingParts::line_to(PeerId to, c10::Device device) {
  MutexLock lock(mutex_);
  std::shared_ptr<PartLine>& line = lines_[{to, device.str()}];
  if (!line) line = std::make_shared<PartLine>(device, part_);
  return line;
}

void OutgoingParts::departed(PeerId peer) {
  std::vector<std::shared_ptr<PartLine>> gone;  // freed without the lock
  MutexLock lock(mutex_);
  for (auto line = lines_.begin(); line != lines_.end();) {
    if (line->first.first != peer) {
      ++line;
      continue;
    }
    gone.push_back(std::move(line->second));
    line = lines_.erase(line);
  }
}

}  // namespace torchspan::rpc
