#include "rpc/tensor_parts/shared_buffers.h"

#include <algorithm>

#include <ATen/core/ivalue.h>
#include <ATen/core/grad_mode.h>

#include "device/api/tensors.h"

namespace torchspan::rpc {
namespace {

/// Large ones: processes that share a device take turns on it, about one for each part, and a turn takes 0.2 ms.
constexpr std::size_t kPartsOfAnArea = 4;
/// The rest of the area is for smaller tensors.
constexpr std::size_t kMostParts = 3;
/// Smaller parts would cost more than the way through the host.
constexpr std::size_t kLeastPart = std::size_t{64} << 10;

}  // namespace

SharedBuffers::SharedBuffers(c10::Device device, SharedArea shared, IsOpen is_open)
    : shared_(std::move(shared)),
      part_(part_of(*shared_.area)),
      is_open_(std::move(is_open)),
      host_(device, std::min(part_, device::DownloadRing::kPart)) {}

SharedBuffers::~SharedBuffers() {
  discard();
  for (const Copied& copied : discarded_) copied.written->wait();
}

std::size_t SharedBuffers::part_of(const LentArea& area) {
  const std::size_t part = area.size() / kPartsOfAnArea;
  return part < kLeastPart ? 0 : part;
}

std::size_t SharedBuffers::lent_parts() const {
  const auto filled =
      std::ranges::count_if(filled_, [](const Copied& copied) { return copied.lent != nullptr; });
  return sent_.size() + static_cast<std::size_t>(filled);
}

void SharedBuffers::forget_returned() {
  sent_.remove_if([&](const Sent& sent) {
    const auto channel = sent.channel.lock();
    return !sent.lent->in_use() || !channel || !is_open_(channel.get());
  });
  forget_written();
}

/// A device that has failed writes nothing more.
void SharedBuffers::forget_written() noexcept {
  discarded_.remove_if([](const Copied& copied) {
    try {
      return copied.written->reached();
    } catch (...) {
      return true;
    }
  });
}

bool SharedBuffers::has_room(std::size_t rest) {
  forget_returned();
  const std::size_t lent = lent_parts();
  if (lent < kMostParts && shared_.area->has_room(std::min(part_, rest))) return true;
  return lent == 0 && host_.has_room(rest);
}

std::size_t SharedBuffers::fill(const at::Tensor& tensor, std::size_t from) {
  forget_returned();
  const std::size_t count = std::min(part_, tensor.nbytes() - from), lent = lent_parts();
  if (lent < kMostParts && copy(tensor, from, count)) return count;
  if (lent != 0) return 0;
  const std::size_t through_host = host_.fill(tensor, from);
  if (through_host != 0) filled_.push_back({});
  return through_host;
}

bool SharedBuffers::copy(const at::Tensor& tensor, std::size_t from, std::size_t count) {
  const std::optional<Lease> lease = shared_.area->take(count);
  if (!lease) return false;
  LentTensorPtr lent = std::make_shared<const LentTensor>(shared_.area, *lease, shared_.route);
  const at::NoGradGuard no_grad;
  const at::Tensor part = device::bytes_of_dense(tensor, from, count);
  device::StreamsScope scope;
  scope.enter(stream());
  lent->view_like(part).copy_(part, /*non_blocking=*/true);
  filled_.push_back({std::move(lent), device::Mark(stream(), events_)});
  return true;
}

bool SharedBuffers::ready() const {
  if (filled_.empty()) return false;
  const Copied& oldest = filled_.front();
  return oldest.lent ? oldest.written->reached() : host_.ready();
}

std::optional<Part> SharedBuffers::take() {
  if (!ready()) return std::nullopt;
  const LentTensorPtr lent = std::move(filled_.front().lent);
  filled_.pop_front();
  return lent ? Part{{}, lent} : host_.take();
}

void SharedBuffers::sent(const Part& part, const std::shared_ptr<net::Channel>& channel) {
  if (!part.lent) return;
  sent_.push_back({part.lent, channel});
  if (shared_.sent != nullptr) shared_.sent->add();
}

/// The copies may still write their parts.
void SharedBuffers::discard() {
  filled_.remove_if([](const Copied& copied) { return !copied.lent; });
  discarded_.splice(discarded_.end(), filled_);
  forget_written();
  host_.discard();
}

}  // namespace torchspan::rpc
