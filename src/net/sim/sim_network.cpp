#include "net/sim/sim_network.h"

#include <algorithm>
#include <cmath>

#include "core/api/throw_invalid.h"
#include "net/sim/sim_transport.h"

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

void SimNetwork::Impl::enter(const std::shared_ptr<SimNode>& node) {
  std::shared_ptr<SimNode>& place = nodes_[node->name];
  if (place && place->alive) {
    throw_invalid("the simulated network has a transport named '{}' already: end it or kill() it first",
                  node->name);
  }
  place = node;
}

void SimNetwork::Impl::leave(const SimNode& node) {
  const auto found = nodes_.find(node.name);
  if (found != nodes_.end() && found->second.get() == &node) nodes_.erase(found);
}

std::shared_ptr<SimLink> SimNetwork::Impl::make_wire(std::string from, std::string to) {
  auto link = std::make_shared<SimLink>();
  link->from = std::move(from);
  link->to = std::move(to);
  if (links_.size() >= sweep_links_at_) {  // doubled: the cost of a link is constant on average
    std::erase_if(links_, [](const auto& old) { return old.expired(); });
    sweep_links_at_ = std::max<std::size_t>(64, 2 * links_.size());
  }
  links_.push_back(link);
  return link;
}

void SimNetwork::Impl::transmit(const std::shared_ptr<SimLink>& link, Packet packet) {
  if (link->dead) return;
  Duration delay = options_.latency + packet.extra;
  if (options_.jitter > Duration::zero()) {
    delay += Duration(static_cast<Duration::rep>(executor.random() %
                                                 static_cast<std::uint64_t>(options_.jitter.count() + 1)));
  }
  packet.due = executor.now() + delay;
  schedule(link, packet.due);
  link->packets.push_back(std::move(packet));
}

void SimNetwork::Impl::transmit_message(const std::shared_ptr<SimLink>& link, Packet packet) {
  if (by_chance(options_.drop)) {
    if (const auto source = link->source.lock()) source->arrived(packet.size());
    return count_dropped();
  }
  if (by_chance(options_.duplicate)) {
    ++counters_.duplicated;
    Packet copy = packet;
    copy.copied = true;
    transmit(link, std::move(packet));
    packet = std::move(copy);
  }
  transmit(link, std::move(packet));
}

bool SimNetwork::Impl::by_chance(double chance) {
  if (chance <= 0) return false;
  return std::ldexp(static_cast<double>(executor.random() >> 11), -53) < chance;
}

void SimNetwork::Impl::schedule(const std::shared_ptr<SimLink>& link, TimePoint when) {
  executor.at(when, [network = weak_from_this(), link] {
    if (const auto alive = network.lock()) alive->pump(link);
  });
}

void SimNetwork::Impl::schedule_all() {
  for (const auto& weak : links_) {
    if (const auto link = weak.lock()) schedule(link, executor.now());
  }
}

void SimNetwork::Impl::pump(const std::shared_ptr<SimLink>& link) {
  MutexLock lock(mutex);
  if (cuts_.contains(link_of(link->from, link->to))) return;
  for (Packet& packet : link->take_due(executor.now(), options_.reorder)) arrive(*link, std::move(packet));
}

void SimNetwork::Impl::arrive(const SimLink& link, Packet packet) {
  if (packet.kind == Packet::Kind::kDial) return take_call(link, std::move(packet));
  const auto target = link.target.lock();
  const auto source = link.source.lock();
  if (!target || !target->node().alive) {
    if (source) source->arrived(packet.size());
    return;
  }
  target->node().inbox.push_back({target, source, std::move(packet)});
  target->node().wake();
}

void SimNetwork::Impl::take_call(const SimLink& link, Packet packet) {
  const auto dialer = link.source.lock();
  if (!dialer) return;
  const auto found = nodes_.find(link.to);
  if (found == nodes_.end() || !found->second->alive || !found->second->listening) {
    return transmit(dialer->inward(), {.kind = Packet::Kind::kNoListener, .header = {}, .segments = {}});
  }
  found->second->inbox.push_back({nullptr, dialer, std::move(packet)});
  found->second->wake();
}

void SimNetwork::Impl::set_options(Options options) {
  MutexLock lock(mutex);
  options_ = options;
  schedule_all();
}

void SimNetwork::Impl::unblock() {
  faults.unblock();
  MutexLock lock(mutex);
  for (const auto& weak : links_) {
    if (const auto link = weak.lock()) {
      link->hold_rest = false;
      for (Packet& packet : link->packets) packet.held = false;
    }
  }
  schedule_all();
}

void SimNetwork::Impl::kill(const std::string& name) {
  MutexLock lock(mutex);
  const auto found = nodes_.find(name);
  if (found == nodes_.end() || !found->second->alive) {
    throw_invalid("the simulated network has no living transport '{}'", name);
  }
  const std::shared_ptr<SimNode> node = found->second;
  for (const auto& weak : links_) {
    const auto link = weak.lock();
    const auto source = link ? link->source.lock() : nullptr;
    if (!source || &source->node() != node.get()) continue;
    link->packets.clear();
    transmit(link, {.kind = Packet::Kind::kEnd, .header = {}, .segments = {}});
    link->dead = true;
  }
  node->alive = false;
  node->wake();
}

void SimNetwork::Impl::sever(const std::string& a, const std::string& b) {
  MutexLock lock(mutex);
  for (const auto& weak : links_) {
    const auto link = weak.lock();
    if (!link || link->dead || link_of(link->from, link->to) != link_of(a, b)) continue;
    link->packets.clear();
    transmit(link, {.kind = Packet::Kind::kEnd, .header = {}, .segments = {}});
    link->dead = true;
  }
}

void SimNetwork::Impl::cut(const std::string& a, const std::string& b) {
  MutexLock lock(mutex);
  cuts_.insert(link_of(a, b));
}

void SimNetwork::Impl::heal(const std::string& a, const std::string& b) {
  MutexLock lock(mutex);
  cuts_.erase(link_of(a, b));
  schedule_all();
}

SimNetwork::Counters SimNetwork::Impl::counters() {
  MutexLock lock(mutex);
  return counters_;
}

SimNetwork::SimNetwork(SimExecutor& executor, Options options)
    : impl_(std::make_shared<Impl>(executor, options)) {}
SimNetwork::~SimNetwork() = default;

std::unique_ptr<Transport> SimNetwork::make_transport(const std::string& name, Handler& handler,
                                                      TransportOptions options) {
  return std::make_unique<SimTransport>(impl_, name, handler, std::move(options));
}

void SimNetwork::set_options(Options options) { impl_->set_options(options); }
void SimNetwork::block(SimPredicate match) { impl_->faults.block(std::move(match)); }
void SimNetwork::block_after(SimPredicate match) { impl_->faults.block_after(std::move(match)); }
void SimNetwork::unblock() { impl_->unblock(); }
void SimNetwork::drop_if(SimPredicate match) { impl_->faults.drop_if(std::move(match)); }
void SimNetwork::delay_if(SimPredicate match, Duration extra) {
  impl_->faults.delay_if(std::move(match), extra);
}
void SimNetwork::kill(const std::string& name) { impl_->kill(name); }
void SimNetwork::sever(const std::string& a, const std::string& b) { impl_->sever(a, b); }
void SimNetwork::cut(const std::string& a, const std::string& b) { impl_->cut(a, b); }
void SimNetwork::heal(const std::string& a, const std::string& b) { impl_->heal(a, b); }
SimNetwork::Counters SimNetwork::counters() const { return impl_->counters(); }
void SimNetwork::observe(std::function<void(const SimMessage&)> observer) {
  impl_->faults.observe(std::move(observer));
}

}  // namespace torchspan::net
