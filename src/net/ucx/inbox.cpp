#include "net/ucx/inbox.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <fmt/format.h>

namespace torchspan::net {
namespace {

/// A peer beyond these does not respect the bounds of senders.
constexpr std::size_t kMostEarly = 1024;
constexpr std::uint64_t kMaxHeldSegments = 2 * kUcxAhead;

[[noreturn]] void refuse_segment(std::string_view what, std::uint64_t number) {
  throw Error(ErrorKind::kInvalid, fmt::format("{} (number {})", what, number));
}

}  // namespace

UcxInbox::UcxInbox(const TransportOptions& options, DeviceAllocator device_memory)
    : allocator_(options.allocator),
      device_memory_(std::move(device_memory)),
      parser_(limits_of(options), options.allocator) {
  parser_.adopt_with(
      [this](std::uint64_t word, std::size_t size) { return announce(UcxAnnouncement::of(word), size); });
}

void UcxInbox::add_chunk(std::uint64_t number, Bytes bytes) {
  if (bytes.empty() || bytes.size() > kUcxChunkBytes)
    refuse_segment("received a chunk of a wrong size", number);
  if (number < next_chunk_ || number - next_chunk_ >= kMostEarly) {
    refuse_segment("received an unexpected chunk", number);
  }
  if (number != next_chunk_) {
    if (!early_chunks_.try_emplace(number, std::move(bytes)).second)
      refuse_segment("received a chunk twice", number);
    return;
  }
  parse(bytes);
  ++next_chunk_;
  while (!early_chunks_.empty() && early_chunks_.begin()->first == next_chunk_) {
    parse(early_chunks_.extract(early_chunks_.begin()).mapped());
    ++next_chunk_;
  }
}

void UcxInbox::parse(BytesView bytes) {
  std::vector<Message> finished;
  std::exception_ptr failure;
  try {
    parser_.feed(bytes, finished);
  } catch (...) {
    failure = std::current_exception();
  }
  for (Message& message : finished) add_pending(std::move(message));
  if (failure) std::rethrow_exception(failure);
}

Buffer UcxInbox::announce(UcxAnnouncement announcement, std::size_t size) {
  const std::uint64_t number = announcement.number;
  if (number != announced_ || size == 0) refuse_segment("a frame announced an unexpected segment", number);
  if (announcement.device_target != 0 && !device_memory_)
    refuse_segment("a frame announced a segment for device memory, which this side does not carry", number);
  ++announced_;
  awaited_.emplace(number, Awaited{.size = size, .device_target = announcement.device_target});
  if (offers_.contains(number)) match(number);
  return {.data = nullptr, .size = size, .owner = nullptr};
}

void UcxInbox::add_pending(Message message) {
  Pending pending{std::move(message), {}, kPrefixBytes};
  pending.bytes += pending.message.header.size() + sizeof(std::uint64_t) * pending.message.segments.size();
  for (std::size_t i = 0; i < pending.message.segments.size(); ++i) {
    const Buffer& segment = pending.message.segments[i];
    if (segment.size != 0 && segment.data == nullptr) {
      pending.missing.emplace_back(i, assigned_++);
    } else {
      pending.bytes += segment.size;
    }
  }
  std::ranges::reverse(pending.missing);
  if (!pending_.empty()) held_ += pending.bytes;
  pending_.push_back(std::move(pending));
}

void UcxInbox::add_offer(std::uint64_t number, UcxOffer offer) {
  const auto awaited = awaited_.find(number);
  const bool due = number >= announced_ ? number - announced_ < kMostEarly
                                        : awaited != awaited_.end() && awaited->second.buffer.data == nullptr;
  if (!due || offers_.contains(number) || offers_.size() >= kMostEarly) {
    refuse_segment("received an unexpected segment", number);
  }
  if (number - first_missing() >= kMostEarly)
    refuse_segment("received a segment too far behind a missing one", number);
  if (awaited != awaited_.end() && awaited->second.size != offer.size) {
    refuse_segment("received a segment whose size differs from the announced one", number);
  }
  offers_.emplace(number, std::move(offer));
  if (awaited != awaited_.end()) ready_.push_back(number);
}

std::uint64_t UcxInbox::first_missing() {
  for (; missing_ < announced_; ++missing_) {
    const auto found = awaited_.find(missing_);
    if (found != awaited_.end() && !found->second.done) break;
  }
  return missing_;
}

void UcxInbox::match(std::uint64_t number) {
  if (offers_.at(number).size != awaited_.at(number).size) {
    refuse_segment("received a segment whose size differs from the announced one", number);
  }
  ready_.push_back(number);
}

Buffer UcxInbox::allocate(const Awaited& awaited) const {
  if (awaited.device_target != 0) {
    Buffer buffer = device_memory_(awaited.device_target, awaited.size);
    buffer.device_target = awaited.device_target;
    if (buffer.data != nullptr && buffer.size >= awaited.size) return buffer;
  }
  return allocate_segment(allocator_, awaited.size);
}

std::optional<UcxInbox::Fetch> UcxInbox::next_fetch() {
  while (!ready_.empty()) {
    const std::uint64_t number = ready_.front();
    Awaited& awaited = awaited_.at(number);
    // The processor copies what came with its offer.
    if (offers_.at(number).descriptor == nullptr) awaited.device_target = 0;
    awaited.buffer = allocate(awaited);
    ready_.pop_front();
    const UcxOffer offer = std::move(offers_.extract(number).mapped());
    if (offer.descriptor != nullptr) return Fetch{number, offer.descriptor, awaited.buffer};
    std::memcpy(awaited.buffer.data, offer.bytes.data(), awaited.size);
    awaited.done = true;
  }
  return std::nullopt;
}

void UcxInbox::fetched(std::uint64_t number) {
  const auto found = awaited_.find(number);
  if (found != awaited_.end()) found->second.done = true;
}

void UcxInbox::take(std::vector<Message>& messages) {
  while (!pending_.empty()) {
    Pending& first = pending_.front();
    while (!first.missing.empty()) {
      const auto [index, number] = first.missing.back();
      const auto found = awaited_.find(number);
      if (!found->second.done) {
        if (held_ > kMaxHeldSegments) refuse_segment("received too much behind a missing segment", number);
        return;
      }
      first.message.segments[index] = std::move(found->second.buffer);
      awaited_.erase(found);
      first.missing.pop_back();
    }
    messages.push_back(std::move(first.message));
    pending_.pop_front();
    if (!pending_.empty()) held_ -= pending_.front().bytes;
  }
}

std::vector<void*> UcxInbox::abandon() {
  std::vector<void*> descriptors;
  for (const auto& [number, offer] : offers_) {
    if (offer.descriptor != nullptr) descriptors.push_back(offer.descriptor);
  }
  offers_.clear();
  ready_.clear();
  return descriptors;
}

}  // namespace torchspan::net
