#include "rendezvous/client/member_events.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

namespace torchspan::rendezvous {
namespace {

/// How many deaths of one cause are named in warnings.
constexpr std::size_t kMostWarnings = 8;

}  // namespace

void DeathLog::write(const std::vector<std::string>& messages, const std::string& how) {
  if (messages.empty()) return;
  const TimePoint now = executor_.now();
  if (warned_ && now - *warned_ < FirstDeath::kConsequences) {
    if (!std::exchange(says_more_, true)) {
      log_.warning(
          fmt::format("more workers died less than {:g} s later: TORCHSPAN_LOG_LEVEL=info logs each of them",
                      to_seconds(FirstDeath::kConsequences)));
    }
    for (const std::string& message : messages) log_.info(message);
    return;
  }
  warned_ = now;
  says_more_ = false;
  for (std::size_t i = 0; i < messages.size() && i < kMostWarnings; ++i) log_.warning(messages[i]);
  if (messages.size() > kMostWarnings)
    log_.warning(fmt::format("{} more workers{}", messages.size() - kMostWarnings, how));
}

void MemberEvents::add(const Member& member, Presence now, std::shared_ptr<const Error> death) {
  auto event = std::make_shared<Event>(Event{member, now, std::move(death)});
  MutexLock lock(mutex_);
  if (cleared_) return;
  std::vector<std::uint64_t>& latest = latest_[member.rank];
  if (now == Presence::kPresent) {
    for (const std::uint64_t number : latest) events_.at(number)->past = true;
    past_.insert(past_.end(), latest.begin(), latest.end());
    latest.clear();
  }
  latest.push_back(end_);
  events_.emplace(end_++, std::move(event));
}

void MemberEvents::watch(Membership::Callbacks callbacks) {
  std::vector<ListenerPtr> ended;  // destroyed without the lock
  const auto listener = std::make_shared<Listener>(Listener{std::move(callbacks)});
  MutexLock lock(mutex_);
  if (cleared_) return;
  remove_ended(ended);
  listener->since = end_;
  listeners_.push_back(listener);
}

void MemberEvents::clear() {
  std::vector<ListenerPtr> forgotten;  // destroyed without the lock
  MutexLock lock(mutex_);
  cleared_ = true;
  forgotten.swap(listeners_);
}

std::size_t MemberEvents::size() const {
  MutexLock lock(mutex_);
  return events_.size();
}

void MemberEvents::remove_ended(std::vector<ListenerPtr>& ended) {
  const auto alive = [](const ListenerPtr& one) {
    return !one->callbacks.owner || !one->callbacks.owner->expired();
  };
  const auto first = std::stable_partition(listeners_.begin(), listeners_.end(), alive);
  ended.insert(ended.end(), std::make_move_iterator(first), std::make_move_iterator(listeners_.end()));
  listeners_.erase(first, listeners_.end());
}

/// Skips the events of earlier holders that came before the listener.
MemberEvents::EventPtr MemberEvents::next_of(Listener& listener) {
  for (auto it = events_.lower_bound(listener.next); it != events_.end(); ++it) {
    listener.next = it->first;
    if (!it->second->past || it->first >= listener.since) return it->second;
  }
  listener.next = end_;
  return nullptr;
}

void MemberEvents::forget_past() {
  std::uint64_t all_had = end_;
  for (const ListenerPtr& listener : listeners_) all_had = std::min(all_had, listener->next);
  std::erase_if(past_, [&](std::uint64_t number) TORCHSPAN_REQUIRES(mutex_) {
    return number < all_had && events_.erase(number) == 1;
  });
}

std::pair<MemberEvents::ListenerPtr, MemberEvents::EventPtr> MemberEvents::next(
    std::vector<ListenerPtr>& ended) {
  MutexLock lock(mutex_);
  remove_ended(ended);
  // The listener with the oldest event is next, so that all get one event before any gets a later one.
  ListenerPtr behind;
  EventPtr oldest;
  for (const ListenerPtr& listener : listeners_) {
    if (behind && listener->next >= behind->next) continue;
    if (EventPtr event = next_of(*listener); event && (!behind || listener->next < behind->next)) {
      behind = listener;
      oldest = std::move(event);
    }
  }
  if (behind) {
    ++behind->next;
  } else if (!past_.empty()) {
    forget_past();
  }
  return {std::move(behind), std::move(oldest)};
}

void MemberEvents::deliver() {
  while (true) {
    std::vector<ListenerPtr> ended;  // destroyed without the lock
    const auto [listener, event] = next(ended);
    if (!listener) return;
    try {
      notify(listener->callbacks, *event);
    } catch (...) {
      runtime_.log.error(
          fmt::format("a membership callback threw: {}", torchspan::describe(std::current_exception()).text));
    }
  }
}

void MemberEvents::notify(const Membership::Callbacks& callbacks, const Event& event) {
  if (event.now == Presence::kPresent) {
    if (callbacks.joined) callbacks.joined(event.member);
  } else if (event.now == Presence::kDied) {
    if (callbacks.died) callbacks.died(event.member, *event.death);
  } else if (callbacks.left) {
    callbacks.left(event.member);
  }
}

}  // namespace torchspan::rendezvous
