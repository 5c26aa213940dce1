#include "collective/point_to_point/message_queue.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <vector>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::collective {
namespace {

/// Offers that an error lists.
constexpr std::size_t kMostListed = 3;

}  // namespace

std::string MessageOperation::call() const {
  const std::string other = from_any ? "any rank" : fmt::format("rank {}", peer);
  return fmt::format("{}({} {} {}, tag {})", sends ? "send" : "recv", contents, sends ? "to" : "from", other,
                     tag);
}

void MessageOperation::succeed() {
  listed.reset();
  if (from_any) {
    promise_from_any->set_value(ReceivedMessage{tensor, peer});
  } else {
    promise->set_value(tensor);
  }
}

void MessageOperation::fail(const Error& error) {
  listed.reset();
  const Error failure = Error(error).with_call(call());
  if (from_any) {
    promise_from_any->set_error(failure);
  } else {
    promise->set_error(failure);
  }
}

channels::Offer MessageQueue::add_send(const MessageOperationPtr& operation) {
  operation->number = next_[operation->peer]++;
  sending_.emplace(Key{operation->peer, operation->number}, operation);
  return {operation->number, static_cast<std::uint32_t>(operation->tag), operation->contents};
}

std::optional<Offered> MessageQueue::add_receive(const MessageOperationPtr& operation) {
  const auto found = std::find_if(offered_.begin(), offered_.end(), [&](const Offered& one) {
    return one.offer.tag == static_cast<std::uint32_t>(operation->tag) &&
           (operation->from_any || one.rank == operation->peer);
  });
  if (found == offered_.end()) {
    waiting_.push_back(operation);
    return std::nullopt;
  }
  Offered offered = std::move(*found);
  offered_.erase(found);
  return offered;
}

MessageOperationPtr MessageQueue::take_receive(int rank, std::uint32_t tag) {
  const auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const MessageOperationPtr& one) {
    return static_cast<std::uint32_t>(one->tag) == tag && (one->from_any || one->peer == rank);
  });
  if (found == waiting_.end()) return nullptr;
  MessageOperationPtr operation = std::move(*found);
  waiting_.erase(found);
  return operation;
}

void MessageQueue::drop_offers(int rank) {
  std::erase_if(offered_, [&](const Offered& one) { return one.rank == rank; });
}

void MessageQueue::begin_receiving(const MessageOperationPtr& operation, int rank, std::uint64_t number) {
  if (!receiving_.emplace(Key{rank, number}, operation).second) {
    waiting_.push_back(operation);  // fails with the group
    throw_invalid("it offers message {} twice", number);
  }
  operation->peer = rank;
  operation->number = number;
  operation->accepted = true;
}

MessageOperationPtr MessageQueue::find(const Numbered& operations, const Key& key) {
  const auto found = operations.find(key);
  if (found != operations.end()) return found->second;
  throw_invalid("message {} is not in flight", key.second);
}

void MessageQueue::finish(const MessageOperation& operation) {
  (operation.sends ? sending_ : receiving_).erase(Key{operation.peer, operation.number});
}

bool MessageQueue::needs(int rank) const {
  bool needed = false;
  visit([&](const MessageOperationPtr& operation) { needed = needed || operation->peer == rank; });
  return needed;
}

MessageOperationPtr MessageQueue::first_from_any() const {
  const auto found =
      std::find_if(waiting_.begin(), waiting_.end(), [](const auto& one) { return one->from_any; });
  return found == waiting_.end() ? nullptr : *found;
}

void MessageQueue::visit(const std::function<void(const MessageOperationPtr&)>& visitor) const {
  for (const auto& [key, operation] : sending_) visitor(operation);
  for (const auto& [key, operation] : receiving_) visitor(operation);
  for (const auto& operation : waiting_) visitor(operation);
}

std::string MessageQueue::unmatched(int rank) const {
  std::vector<std::string> texts;
  std::size_t more = 0;
  for (const Offered& one : offered_) {
    if (one.rank != rank) continue;
    if (texts.size() == kMostListed) {
      ++more;
    } else {
      texts.push_back(fmt::format("{:.200} with tag {}", one.offer.text, one.offer.tag));
    }
  }
  if (more > 0) texts.push_back(fmt::format("{} more", more));
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
