#include "collective/world_link.h"

#include <algorithm>
#include <fmt/format.h>
#include <numeric>

namespace torchspan::collective {

using rendezvous::Member;
using rendezvous::Membership;

namespace {

/// How long await_first_departed() waits: the death of a process on this host is known at once, unless the machine is busy.
constexpr Duration kForTheMembership = std::chrono::seconds(1);

}  // namespace

std::vector<Bytes> gather_in_order(Membership& world, const std::string& tag, BytesView mine,
                                   const std::vector<int>& ranks, Deadline deadline, bool once) {
  std::vector<Bytes> sorted = world.all_gather_bytes(tag, mine, ranks, {.until = deadline, .once = once});
  std::vector<std::size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return ranks[a] < ranks[b]; });
  std::vector<Bytes> by_rank(sorted.size());
  for (std::size_t i = 0; i < order.size(); ++i) by_rank[order[i]] = std::move(sorted.at(i));
  return by_rank;
}

GroupMembers GroupMembers::of(const std::vector<Member>& members) {
  GroupMembers all;
  for (const Member& member : members) {
    all.ranks.push_back(member.rank);
    all.names.push_back(describe(member));
    all.instances.push_back(member.instance);
  }
  return all;
}

bool GroupMembers::contains(const Member& member) const {
  return std::ranges::find(instances, member.instance) != instances.end();
}

GroupMembers GroupMembers::part(const std::vector<int>& of_ranks) const {
  GroupMembers some{.ranks = of_ranks};
  for (const int rank : of_ranks) {
    const auto place = static_cast<std::size_t>(std::ranges::find(ranks, rank) - ranks.begin());
    some.names.push_back(names[place]);
    if (!instances.empty()) some.instances.push_back(instances[place]);
  }
  return some;
}

std::vector<Bytes> ConnectionRounds::gather(WorldLink& world, BytesView mine, const std::vector<int>& ranks,
                                            Deadline deadline) {
  const bool once = split != 0;
  const std::string name = once ? fmt::format("torchspan.split.{:x}.{}", split, count++) : tag;
  return world.ask(
      [&](Membership& members) { return gather_in_order(members, name, mine, ranks, deadline, once); });
}

std::string text_of_departed(const std::string& peer, const std::string& how) {
  return how.starts_with(peer) ? how : fmt::format("{} is gone: {}", peer, how);
}

Error departed_rank_error(const std::string& peer, const std::string& how) {
  return {ErrorKind::kDisconnected,
          fmt::format("{}, and the group cannot continue without it", text_of_departed(peer, how))};
}

Error aborted_by(const std::string& peer, const Error& cause) {
  constexpr std::string_view kAborted = " aborted the group: ";
  if (cause.message().find(kAborted) != std::string::npos) return cause;
  return {cause.kind(), fmt::format("{}{}{}", peer, kAborted, cause.message())};
}

WorldLink::WorldLink(std::shared_ptr<Runtime> runtime, Membership& world)
    : runtime_(std::move(runtime)), world_(world), self_(world.self()) {}

std::shared_ptr<WorldLink> WorldLink::make(std::shared_ptr<Runtime> runtime, Membership& world) {
  const std::shared_ptr<WorldLink> link(new WorldLink(std::move(runtime), world));
  const auto hold = std::make_shared<Hold>(link);
  world.watch({.died =
                   [hold](const Member& member, const Error& reason) {
                     if (const auto link = hold->link.lock()) link->note_death(member, reason);
                   },
               .left =
                   [hold](const Member& member) {
                     const auto link = hold->link.lock();
                     if (!link) return;
                     link->note_departed(member, "it left the world");
                     for (const auto& listener : link->listeners()) listener->member_left(member);
                   },
               .owner = link});
  return link;
}

void WorldLink::note_death(const Member& member, const Error& reason) {
  if (member.instance == self_.instance) return end(reason);
  note_departed(member, reason.message());
  for (const auto& listener : listeners()) listener->member_died(member, reason);
}

void WorldLink::add(const std::weak_ptr<WorldListener>& listener) {
  std::optional<Error> ended;
  {
    MutexLock lock(mutex_);
    // Without a death, nothing else removes those of parts that ended.
    std::erase_if(listeners_, [](const auto& one) { return one.expired(); });
    listeners_.push_back(listener);
    ended = ended_;
  }
  const auto living = listener.lock();
  if (ended && living) living->world_ended(*ended);
}

std::vector<std::shared_ptr<WorldListener>> WorldLink::listeners() {
  std::vector<std::shared_ptr<WorldListener>> living;
  MutexLock lock(mutex_);
  std::erase_if(listeners_, [](const auto& listener) { return listener.expired(); });
  for (const auto& listener : listeners_) {
    if (auto one = listener.lock()) living.push_back(std::move(one));
  }
  return living;
}

void WorldLink::note_departed(const Member& member, const std::string& how) {
  MutexLock lock(mutex_);
  departed_.emplace_back(member.instance, how);
  for (Parker* const parker : awaiting_departed_) parker->unpark();
}

std::optional<std::string> WorldLink::departed(std::uint64_t instance) {
  MutexLock lock(mutex_);
  const auto found = std::find_if(departed_.begin(), departed_.end(),
                                  [&](const auto& one) { return one.first == instance; });
  return found == departed_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<WorldLink::DepartedRank> WorldLink::find_first_departed(
    const std::vector<std::uint64_t>& instances) const {
  for (const auto& [instance, how] : departed_) {
    const auto found = std::find(instances.begin(), instances.end(), instance);
    if (found != instances.end())
      return DepartedRank{static_cast<std::size_t>(found - instances.begin()), how};
  }
  return std::nullopt;
}

std::optional<WorldLink::DepartedRank> WorldLink::first_departed(
    const std::vector<std::uint64_t>& instances) {
  MutexLock lock(mutex_);
  return find_first_departed(instances);
}

std::optional<WorldLink::DepartedRank> WorldLink::await_first_departed(
    const std::vector<std::uint64_t>& instances) {
  const auto parker = runtime_->executor.make_parker();
  const Deadline until = runtime_->executor.deadline_in(kForTheMembership);
  {
    MutexLock lock(mutex_);
    awaiting_departed_.push_back(parker.get());
  }
  for (;;) {
    {
      MutexLock lock(mutex_);
      auto first = find_first_departed(instances);
      if (first || ended_ || until.passed(runtime_->executor.now())) {
        std::erase(awaiting_departed_, parker.get());
        return first;
      }
    }
    parker->park(until);
  }
}

std::string WorldLink::cause_of_loss(const GroupMembers& members, const DepartedRank& lost) {
  const auto first = await_first_departed(members.instances);
  if (!first) {
    return fmt::format(
        "{}, as {} reports; the world still counts {} as a member: if it lives, the network between these "
        "two "
        "is cut",
        lost.how, describe(self_), members.names[lost.rank]);
  }
  const std::string text = text_of_departed(members.names[first->rank], first->how);
  return first->rank == lost.rank ? text
                                  : fmt::format("{}; after it, {} ended too", text, members.names[lost.rank]);
}

std::optional<Error> WorldLink::ended() {
  MutexLock lock(mutex_);
  return ended_;
}

void WorldLink::end(const Error& reason) {
  {
    MutexLock lock(mutex_);
    if (ended_) return;
    ended_ = reason;
    for (Parker* const parker : awaiting_departed_) parker->unpark();
  }
  for (const auto& listener : listeners()) listener->world_ended(reason);
}

void WorldLink::close() {
  end(Error(
      ErrorKind::kCancelled,
      fmt::format(
          "{} has left the world, which ended its groups: use groups, and objects made from them, before "
          "shutdown() and while the session exists",
          describe(self_))));
  const auto parker = runtime_->executor.make_parker();
  for (;;) {
    {
      MutexLock lock(mutex_);
      closing_ = asking_ > 0 ? parker.get() : nullptr;
      if (asking_ == 0) break;
    }
    parker->park(Deadline::never());
  }
  for (const auto& listener : listeners()) listener->world_closing();
}

WorldLink::Asking::Asking(WorldLink& link) : link_(link) {
  MutexLock lock(link_.mutex_);
  if (link_.ended_) throw Error(*link_.ended_);
  ++link_.asking_;
}

WorldLink::Asking::~Asking() {
  MutexLock lock(link_.mutex_);
  if (--link_.asking_ == 0 && link_.closing_ != nullptr) link_.closing_->unpark();
}

}  // namespace torchspan::collective
