#include "collective/point_to_point/message_queue.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <torchspan/core/error.h>

namespace torchspan::collective {
namespace {

/// Offers that an error lists.
constexpr std::size_t kMostListed = 3;

}  // namespace

std::string MessageOperation::call() const {
  return fmt::format("{}({} {} rank {}, tag {})", sends ? "send" : "recv", contents, sends ? "to" : "from",
                     peer, tag);
}

channels::Offer MessageQueue::add_send(const MessageOperationPtr& operation) {
  operation->number = next_++;
  sending_.emplace(operation->number, operation);
  return {operation->number, static_cast<std::uint32_t>(operation->tag), operation->contents};
}

std::optional<Offered> MessageQueue::add_receive(const MessageOperationPtr& operation) {
  const auto found = std::find_if(offered_.begin(), offered_.end(), [&](const Offered& one) {
    return one.offer.tag == static_cast<std::uint32_t>(operation->tag);
  });
  if (found == offered_.end()) {
    waiting_.push_back(operation);
    return std::nullopt;
  }
  Offered offered = std::move(*found);
  offered_.erase(found);
  return offered;
}

MessageOperationPtr MessageQueue::take_receive(std::uint32_t tag) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const MessageOperationPtr& one) {
    return static_cast<std::uint32_t>(one->tag) == tag;
  });
  if (found == waiting_.end()) return nullptr;
  MessageOperationPtr operation = std::move(*found);
  waiting_.erase(found);
  return operation;
}

void MessageQueue::begin_receiving(const MessageOperationPtr& operation, std::uint64_t number) {
  if (!receiving_.emplace(number, operation).second) {
    waiting_.push_back(operation);  // fails with the group
    throw Error(ErrorKind::kInvalid, fmt::format("it offers message {} twice", number));
  }
  operation->number = number;
  operation->accepted = true;
}

MessageOperationPtr MessageQueue::find(const Numbered& operations, std::uint64_t number) {
  const auto found = operations.find(number);
  if (found != operations.end()) return found->second;
  throw Error(ErrorKind::kInvalid, fmt::format("message {} is not under way", number));
}

void MessageQueue::finish(const MessageOperation& operation) {
  (operation.sends ? sending_ : receiving_).erase(operation.number);
}

void MessageQueue::visit(const std::function<void(const MessageOperationPtr&)>& visitor) const {
  for (const auto& [number, operation] : sending_) visitor(operation);
  for (const auto& [number, operation] : receiving_) visitor(operation);
  for (const auto& operation : waiting_) visitor(operation);
}

std::string MessageQueue::unmatched() const {
  std::vector<std::string> texts;
  for (const Offered& one : offered_) {
    if (texts.size() == kMostListed) break;
    texts.push_back(fmt::format("{:.200} with tag {}", one.offer.text, one.offer.tag));
  }
  if (offered_.size() > kMostListed) texts.push_back(fmt::format("{} more", offered_.size() - kMostListed));
  return fmt::format("{}", fmt::join(texts, "; "));
}

std::deque<MessageOperationPtr> MessageQueue::take_all() {
  std::deque<MessageOperationPtr> all;
  visit([&](const MessageOperationPtr& operation) { all.push_back(operation); });
  sending_.clear();
  receiving_.clear();
  waiting_.clear();
  offered_.clear();
  return all;
}

}  // namespace torchspan::collective
