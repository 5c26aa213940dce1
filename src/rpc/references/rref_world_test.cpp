#include "rpc/references/rref_world.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::rpc::testing {

using Effects = RRefTable::Effects;

namespace {
const char* name(RRefMessage::Kind kind) {
  constexpr std::array kNames = {"fork request", "child accept", "user delete", "given up"};
  return kNames.at(static_cast<std::size_t>(kind));
}
}  // namespace

RRefWorld::RRefWorld(std::size_t workers, std::uint64_t seed) : random_(seed), workers_(workers) {
  for (std::uint32_t rank = 0; rank < workers; ++rank) {
    Worker& worker = workers_[rank];
    worker.id = {rank, 0};
    worker.table = std::make_unique<RRefTable>(rank);
    worker.table->begin(worker.id);
    Effects effects;
    for (std::uint32_t other = 0; other < workers; ++other) worker.table->join({other, 0}, effects);
  }
}

RRefWorld::~RRefWorld() {
  for (Worker& worker : workers_) worker.alive = false;
  for (Worker& worker : workers_) {
    worker.program.clear();
    worker.creating.clear();
    worker.table.reset();
  }
}

void RRefWorld::fail(std::string what) {
  if (failure_.empty()) failure_ = std::move(what);
}
void RRefWorld::record(const std::string& line) {
  if (tracing_) trace_text_ += line + "\n";
}
RRefWorld::Worker* RRefWorld::alive(PeerId id) {
  Worker& worker = at(id.rank);
  return worker.alive && worker.id == id ? &worker : nullptr;
}
RRefWorld::Value& RRefWorld::value_of(const wire::Handle& handle) {
  return values_[by_id_.at({{handle.owner, handle.incarnation}, handle.value})];
}

bool RRefWorld::is_protected(const Book& book) const {
  const Value& value = values_[book.value];
  const auto lives = [&](PeerId id) {
    const Worker& worker = workers_[id.rank];
    return worker.alive && worker.id == id;
  };
  return book.living && !book.orphan && !value.failed && lives(value.owner) && lives(book.holder);
}

/// Marks the references that were copied from `gone` and that their owner does not know: they are lost, too.
void RRefWorld::orphan_below(const std::set<GlobalId>& gone) {
  for (auto& [fork, book] : books_) {
    if (book.known || !book.living) continue;
    for (auto parent = book.parent; parent; parent = books_.at(*parent).parent) {
      if (gone.contains(*parent)) book.orphan = true;
      if (books_.at(*parent).known || book.orphan) break;
    }
  }
}

void RRefWorld::ended(Object& object) {
  books_.at(*object.fork).living = false;
  Worker* worker = alive(object.holder);
  if (worker == nullptr) return;
  Effects effects;
  worker->table->held().release(*object.fork, effects);
  apply(*worker, std::move(effects));
}

void RRefWorld::send(Worker& from, const RRefMessage& message) {
  ++messages_;
  from.unanswered.emplace_back(++numbers_, message);
  Packet packet{Packet::Kind::kControl, from.id, message.to, message, numbers_};
  bag_.push_back(std::move(packet));
}

void RRefWorld::apply(Worker& worker, Effects effects) {
  for (const RRefMessage& message : effects.messages) send(worker, message);
  for (const auto& failed : effects.failed) std::static_pointer_cast<Object>(failed.reference)->failed = true;
}

bool RRefWorld::create(Worker& worker, Worker& owner, bool fails) {
  const PeerId to = worker.table->presence().latest(owner.id.rank);
  if (!worker.table->presence().present(to)) return false;
  const GlobalId id = worker.table->next_value(to.rank), fork = worker.table->next_id();
  by_id_[{to, id}] = values_.size();
  values_.push_back({id, to, worker.id});
  const std::size_t value = values_.size() - 1;
  auto object = std::make_shared<Object>(*this, worker.id, value);
  if (to == worker.id) {
    worker.table->owned().expect_own(id, object);
  } else {
    books_[fork] = {value, worker.id, std::nullopt, true};
    books_[fork].held = object;
    object->fork = fork;
    worker.table->held().add_creating(to, id, fork, object);
  }
  worker.creating[fork] = object;
  worker.program.push_back(object);
  if (fails) return fail_creation(worker, fork), true;
  Packet packet{Packet::Kind::kCreate, worker.id, to};
  packet.handle = {to.rank, id, fork, 0, to.incarnation};
  if (alive(to) != nullptr) bag_.push_back(std::move(packet));
  return true;
}

bool RRefWorld::own(Worker& worker) {
  const GlobalId id = worker.table->next_value(worker.id.rank);
  by_id_[{worker.id, id}] = values_.size();
  values_.push_back({id, worker.id, worker.id, true});
  auto object = std::make_shared<Object>(*this, worker.id, values_.size() - 1);
  object->payload = std::make_shared<int>(1);
  values_.back().payload = object->payload;
  values_.back().made = 1;
  worker.program.push_back(std::move(object));
  return true;
}

bool RRefWorld::share(Worker& worker, std::size_t index, Worker& other, bool fails) {
  if (worker.program.empty()) return false;
  const ObjectPtr object = worker.program[index % worker.program.size()];
  const Value& value = values_[object->value];
  const PeerId to = worker.table->presence().latest(other.id.rank);
  if (object->failed || worker.table->presence().of(value.owner) == Presence::Standing::kDeparted)
    return false;
  const auto fork =
      object->fork ? worker.table->send_user(object, to) : worker.table->send_owner(value.id, object, to);
  if (!fork) return false;
  Packet packet{Packet::Kind::kCarry, worker.id, to};
  packet.handle = {value.owner.rank, value.id, *fork, 0, value.owner.incarnation};
  Book& book = books_[*fork] = {object->value, to, object->fork};
  book.known = !object->fork;
  book.orphan = object->fork && books_.at(*object->fork).orphan;
  if (fails) {
    book.living = false;
    Effects effects;
    worker.table->unsend(packet.handle, effects);
    apply(worker, std::move(effects));
  } else if (alive(to) == nullptr) {
    book.living = false;
  } else {
    bag_.push_back(std::move(packet));
  }
  return true;
}

bool RRefWorld::drop(Worker& worker, std::size_t index) {
  if (worker.program.empty()) return false;
  index %= worker.program.size();
  const ObjectPtr object = std::move(worker.program[index]);
  worker.program.erase(worker.program.begin() + static_cast<std::ptrdiff_t>(index));
  return true;
}

void RRefWorld::fail_creation(Worker& worker, GlobalId fork) {
  const auto found = worker.creating.find(fork);
  if (found == worker.creating.end()) return;
  const ObjectPtr object = found->second;
  worker.creating.erase(found);
  object->failed = true;
  values_[object->value].given_up = true;
  Effects effects;
  if (object->fork) {
    books_.at(fork).living = false;
    orphan_below({fork});
    worker.table->held().give_up(fork, "late", effects);
  } else {
    values_[object->value].failed = true;
    worker.table->owned().own_creation_ended(values_[object->value].id, effects);
  }
  apply(worker, std::move(effects));
}

/// Makes a creation fail: something it needs is a failure, or its function throws.
bool RRefWorld::refuse(std::uint32_t pick) {
  for (std::size_t i = 0; i < bag_.size(); ++i) {
    Packet& packet = bag_[(i + pick) % bag_.size()];
    if (packet.kind != Packet::Kind::kCreate || packet.failed) continue;
    packet.failed = true;
    return true;
  }
  return false;
}

bool RRefWorld::give_up(std::uint32_t pick) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = at(static_cast<std::uint32_t>(i + pick));
    if (!worker.alive || worker.creating.empty()) continue;
    auto it = worker.creating.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(pick / 8 % worker.creating.size()));
    fail_creation(worker, GlobalId(it->first));
    return true;
  }
  return false;
}

bool RRefWorld::repeat(std::uint32_t pick) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = at(static_cast<std::uint32_t>(i + pick));
    if (!worker.alive || worker.unanswered.empty()) continue;
    const auto& [number, message] = worker.unanswered[pick / 8 % worker.unanswered.size()];
    bag_.push_back({Packet::Kind::kControl, worker.id, message.to, message, number});
    return true;
  }
  return false;
}

bool RRefWorld::lose(std::uint32_t pick) {
  for (std::size_t i = 0; i < bag_.size(); ++i) {
    const std::size_t index = (i + pick) % bag_.size();
    if (bag_[index].kind != Packet::Kind::kControl && bag_[index].kind != Packet::Kind::kAnswer) continue;
    bag_.erase(bag_.begin() + static_cast<std::ptrdiff_t>(index));
    return true;
  }
  return false;
}

/// Handles a lost packet on its sender and its receiver.
void RRefWorld::lose_packet(const Packet& packet) {
  if (packet.kind == Packet::Kind::kCarry) books_.at(packet.handle.fork).living = false;
  Worker* creator = nullptr;
  if (packet.kind == Packet::Kind::kCreate) creator = alive(packet.from);
  if (packet.kind == Packet::Kind::kCreated) creator = alive(packet.to);
  if (creator != nullptr) fail_creation(*creator, packet.handle.fork);
  Worker* asker = nullptr;
  if (packet.kind == Packet::Kind::kAudit) asker = alive(packet.from);
  if (packet.kind == Packet::Kind::kAudited) asker = alive(packet.to);
  if (asker != nullptr) asker->audits.insert(packet.kind == Packet::Kind::kAudit ? packet.to : packet.from);
}

bool RRefWorld::break_connection(Worker& a, Worker& b, std::uint32_t draw) {
  if (!a.alive || !b.alive || &a == &b) return false;
  std::vector<Packet> lost;
  std::erase_if(bag_, [&](Packet& packet) {
    const bool between =
        (packet.from == a.id && packet.to == b.id) || (packet.from == b.id && packet.to == a.id);
    draw = draw * 1664525u + 1013904223u;
    if (!between || (draw >> 30) == 0) return false;
    lost.push_back(std::move(packet));
    return true;
  });
  for (const Packet& packet : lost) lose_packet(packet);
  a.audits.insert(b.id);
  b.audits.insert(a.id);
  return true;
}

bool RRefWorld::audit(std::uint32_t pick) {
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    Worker& worker = at(static_cast<std::uint32_t>(i + pick));
    if (!worker.alive || worker.audits.empty()) continue;
    const PeerId peer = *worker.audits.begin();
    worker.audits.erase(worker.audits.begin());
    Packet packet{Packet::Kind::kAudit, worker.id, peer};
    packet.asked = worker.table->forks_at(peer);
    if (alive(peer) != nullptr && !packet.asked.empty()) bag_.push_back(std::move(packet));
    return true;
  }
  return false;
}

bool RRefWorld::crash(Worker& worker, std::uint32_t draw) {
  if (!worker.alive) return false;
  worker.alive = false;
  std::erase_if(bag_, [&](const Packet& packet) {
    draw = draw * 1664525u + 1013904223u;
    const bool lost = packet.to == worker.id || (packet.from == worker.id && (draw >> 31) == 0);
    if (lost && packet.kind == Packet::Kind::kCarry) books_.at(packet.handle.fork).living = false;
    return lost;
  });
  std::set<GlobalId> gone;
  for (auto& [fork, book] : books_) {
    if (book.holder != worker.id) continue;
    book.living = false;
    gone.insert(fork);
  }
  orphan_below(gone);
  worker.program.clear();
  worker.creating.clear();
  worker.unanswered.clear();
  worker.audits.clear();
  worker.news.clear();
  worker.table.reset();
  for (Worker& other : workers_) {
    if (other.alive) other.news.emplace_back(worker.id, false);
  }
  return true;
}

bool RRefWorld::restart(Worker& worker) {
  if (worker.alive) return false;
  ++worker.id.incarnation;
  worker.alive = true;
  worker.table = std::make_unique<RRefTable>(worker.id.rank);
  worker.table->begin(worker.id);
  Effects effects;
  for (Worker& other : workers_) {
    if (&other == &worker) continue;
    worker.table->join(other.id, effects);
    if (!other.alive) worker.table->depart(other.id, effects);
    if (other.alive) other.news.emplace_back(worker.id, true);
  }
  return true;
}

bool RRefWorld::receive_membership_event(Worker& worker) {
  if (!worker.alive || worker.news.empty()) return false;
  const auto [peer, joined] = worker.news.front();
  worker.news.pop_front();
  Effects effects;
  if (joined) {
    worker.table->join(peer, effects);
    apply(worker, std::move(effects));
    return true;
  }
  for (Value& value : values_) {
    if (value.owner == worker.id && value.creator == peer && !value.came) value.failed = true;
  }
  worker.table->depart(peer, effects);
  apply(worker, std::move(effects));
  worker.audits.erase(peer);
  const auto unanswered = worker.unanswered;
  for (const auto& [number, message] : unanswered) {
    if (message.to != peer) continue;
    std::erase_if(worker.unanswered, [n = number](const auto& one) { return one.first == n; });
    answered(worker, message, false);
  }
  std::vector<GlobalId> lost;
  for (const auto& [fork, object] : worker.creating) {
    if (values_[object->value].owner == peer) lost.push_back(fork);
  }
  for (const GlobalId& fork : lost) fail_creation(worker, fork);
  return true;
}

bool RRefWorld::act(const RRefStep& step) {
  Worker& worker = at(step.a);
  Worker& other = at(step.b);
  using Kind = RRefStep::Kind;
  switch (step.kind) {
    case Kind::kDeliver:
      return deliver(step.a);
    case Kind::kMembershipEvent:
      return receive_membership_event(worker);
    case Kind::kCreate:
    case Kind::kCreateFails:
      return worker.alive && create(worker, other, step.kind == Kind::kCreateFails);
    case Kind::kRefuse:
      return refuse(step.a);
    case Kind::kOwnValue:
      return worker.alive && own(worker);
    case Kind::kShare:
    case Kind::kShareFails:
      return worker.alive && share(worker, step.c, other, step.kind == Kind::kShareFails);
    case Kind::kDrop:
      return worker.alive && drop(worker, step.b);
    case Kind::kGiveUp:
      return give_up(step.a);
    case Kind::kRepeat:
      return repeat(step.a);
    case Kind::kLose:
      return lose(step.a);
    case Kind::kBreak:
      return break_connection(worker, other, step.c);
    case Kind::kAudit:
      return audit(step.a);
    case Kind::kCrash:
      return crash(worker, step.c);
    case Kind::kRestart:
      return restart(worker);
  }
  return false;
}

void RRefWorld::step(const RRefStep& step) {
  if (tracing_) trace_text_ += describe(step) + "\n";
  if (!act(step)) {
    if (tracing_) trace_text_ += "    (nothing to do)\n";
    return;
  }
  ++done_.at(static_cast<std::size_t>(step.kind));
  check();
}

/// Compares the tables with the model.
void RRefWorld::check() {
  std::vector<const Book*> kept_by(values_.size(), nullptr);
  for (const auto& [fork, book] : books_) {
    if (!is_protected(book)) continue;
    kept_by[book.value] = &book;
    if (book.known || !book.parent) continue;
    if (books_.at(*book.parent).held.expired())
      fail(fmt::format("the parent of {} was released before its owner knew it", str(fork)));
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    const Value& value = values_[i];
    const Worker* owner = alive(value.owner);
    if (owner == nullptr || !value.came || value.failed || !value.payload.expired()) continue;
    if (kept_by[i] != nullptr)
      fail(fmt::format("value {} ended although {} refers to it", str(value.id), str(kept_by[i]->holder)));
    for (const ObjectPtr& held : owner->program) {
      if (held->value == i && !held->fork && !held->failed)
        fail(fmt::format("value {} ended although its owner's program holds it", str(value.id)));
    }
  }
}

std::string RRefWorld::run(const RRefSchedule& schedule) {
  for (const RRefStep& one : schedule) {
    step(one);
    if (!failure_.empty()) return failure_;
  }
  settle();
  if (failure_.empty()) check_empty();
  return failure_;
}

/// Runs without more work by programs and without crashes until everything has ended.
void RRefWorld::settle() {
  record("the end begins");
  for (int i = 0; i < 100'000; ++i) {
    if (!settle_step()) return;
    check();
    if (!failure_.empty()) return;
  }
  fail("the tables still send messages");
}

bool RRefWorld::settle_step() {
  if (!bag_.empty() && deliver(random_())) return true;
  bool any = false;
  for (Worker& worker : workers_) {
    if (!worker.alive) continue;
    any = receive_membership_event(worker) || any;
    any = drop(worker, random_()) || any;
  }
  any = audit(static_cast<std::uint32_t>(random_())) || any;
  if (any || !bag_.empty()) return true;
  for (Worker& worker : workers_) {
    if (!worker.alive) continue;
    for (const auto& [number, message] : worker.unanswered) {
      bag_.push_back({Packet::Kind::kControl, worker.id, message.to, message, number});
      any = true;
    }
  }
  return any;
}

void RRefWorld::check_empty() {
  for (const Worker& worker : workers_) {
    if (!worker.alive) continue;
    const auto counts = worker.table->counts();
    if (counts.owners + counts.forks + counts.users + counts.pending_users + counts.pending_children != 0) {
      fail(fmt::format("left at {}: {} values, {} forks, {} references, {} unconfirmed, {} for children",
                       str(worker.id), counts.owners, counts.forks, counts.users, counts.pending_users,
                       counts.pending_children));
    }
    if (!worker.creating.empty()) fail("a creation never ended");
  }
  for (const Value& value : values_) {
    if (!value.payload.expired()) fail(fmt::format("value {} is alive without a reference", str(value.id)));
  }
}

std::string RRefWorld::describe(const RRefStep& step) const {
  constexpr std::array kNames = {"deliver", "news",
                                 "create",  "own",
                                 "share",   "share, but it fails",
                                 "drop",    "create, but it fails",
                                 "refuse",  "give up",
                                 "repeat",  "lose",
                                 "break",   "audit",
                                 "crash",   "restart"};
  std::string text = fmt::format("{} {} {} {}", kNames.at(static_cast<std::size_t>(step.kind)),
                                 step.a % workers_.size(), step.b % workers_.size(), step.c % 100);
  if (step.kind != RRefStep::Kind::kDeliver || bag_.empty()) return text;
  const Packet& packet = bag_[step.a % bag_.size()];
  constexpr std::array kMessageKinds = {"",          "answer to ", "creation", "created",
                                        "reference", "audit",      "audited"};
  text = fmt::format("deliver {} -> {}: {}", str(packet.from), str(packet.to),
                     kMessageKinds.at(static_cast<std::size_t>(packet.kind)));
  if (packet.kind <= Packet::Kind::kAnswer)
    return text + fmt::format("{} of {} ({})", name(packet.message.kind), str(packet.message.fork),
                              str(packet.message.value));
  return text + fmt::format(" {} of value {} of {}", str(packet.handle.fork), str(packet.handle.value),
                            packet.handle.owner);
}

}  // namespace torchspan::rpc::testing
