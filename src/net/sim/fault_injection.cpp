#include "net/sim/fault_injection.h"

#include <algorithm>

namespace torchspan::net {

template <class Change>
void FaultInjection::change(Change change) {
  // The old rules are destroyed outside the lock, because predicates own what they captured.
  std::shared_ptr<const Rules> old;
  MutexLock lock(mutex_);
  auto next = std::make_shared<Rules>(*rules_);
  change(*next);
  old = std::exchange(rules_, std::move(next));
}

void FaultInjection::block(SimPredicate match) {
  change([&](Rules& rules) { rules.blocks.push_back(std::move(match)); });
}

void FaultInjection::block_after(SimPredicate match) {
  std::uint64_t id;
  {
    MutexLock lock(mutex_);
    id = next_id_++;
  }
  change([&](Rules& rules) { rules.blocks_after.emplace_back(id, std::move(match)); });
}

void FaultInjection::unblock() {
  change([](Rules& rules) {
    rules.blocks.clear();
    rules.blocks_after.clear();
  });
}

void FaultInjection::drop_if(SimPredicate match) {
  change([&](Rules& rules) { rules.drop = std::move(match); });
}

void FaultInjection::delay_if(SimPredicate match, Duration extra) {
  change([&](Rules& rules) {
    rules.delay = std::move(match);
    rules.extra = extra;
  });
}

void FaultInjection::observe(std::function<void(const SimMessage&)> observer) {
  change([&](Rules& rules) { rules.observer = std::move(observer); });
}

bool FaultInjection::use_up(std::uint64_t id) {
  std::size_t removed = 0;
  change([&](Rules& rules) {
    removed = std::erase_if(rules.blocks_after, [&](const auto& rule) { return rule.first == id; });
  });
  return removed != 0;
}

Delivery FaultInjection::decide(const SimMessage& message) {
  std::shared_ptr<const Rules> rules;
  {
    MutexLock lock(mutex_);
    rules = rules_;
  }
  if (rules->observer) rules->observer(message);
  Delivery delivery;
  delivery.dropped = rules->drop && rules->drop(message);
  if (delivery.dropped) return delivery;
  delivery.held =
      std::ranges::any_of(rules->blocks, [&](const SimPredicate& match) { return match(message); });
  for (const auto& [id, match] : rules->blocks_after) {
    if (match(message) && use_up(id)) delivery.hold_rest = true;
  }
  if (rules->delay && rules->delay(message)) delivery.extra = rules->extra;
  return delivery;
}

}  // namespace torchspan::net
