// How the workers of an RRefWorld handle what arrives.
#include "rpc/references/rref_world.h"

namespace torchspan::rpc::testing {

using Effects = RRefTable::Effects;

bool RRefWorld::deliver(std::size_t index) {
  if (bag_.empty()) return false;
  index %= bag_.size();
  Worker* here = alive(bag_[index].to);
  const bool by_rank = bag_[index].kind == Packet::Kind::kControl || bag_[index].kind == Packet::Kind::kAudit;
  if (here == nullptr && by_rank) {  // the process that has the rank now may get it, if the sender knows it
    Worker* sender = alive(bag_[index].from);
    here = &at(bag_[index].to.rank);
    if (!here->alive || sender == nullptr || !sender->table->presence().present(here->id)) here = nullptr;
  }
  if (here != nullptr && here->table->presence().of(bag_[index].from) == Presence::Standing::kUnknown)
    return false;  // it waits until its sender is known to have joined
  const Packet packet = std::move(bag_[index]);
  bag_.erase(bag_.begin() + static_cast<std::ptrdiff_t>(index));
  if (here == nullptr) return true;
  switch (packet.kind) {
    case Packet::Kind::kControl:
      arrive_control(*here, packet);
      break;
    case Packet::Kind::kAnswer:
      arrive_answer(*here, packet);
      break;
    case Packet::Kind::kCreate:
      arrive_creation(*here, packet);
      break;
    case Packet::Kind::kCreated:
      arrive_created(*here, packet);
      break;
    case Packet::Kind::kCarry:
      arrive_carry(*here, packet);
      break;
    case Packet::Kind::kAudit: {
      std::vector<GlobalId> forks;
      for (const auto& [fork, value] : packet.asked) forks.push_back(fork);
      Packet reply{Packet::Kind::kAudited, packet.to, packet.from};
      reply.asked = packet.asked;
      reply.lost = here->table->held().missing(forks, packet.from);
      for (const GlobalId& fork : reply.lost) {
        Book& book = books_.at(fork);
        if (is_protected(book) && !book.held.expired() && book.holder == here->id)
          fail("a reference was reported lost although it is here: " + str(fork));
        book.living = false;  // if it arrives later, it is refused
      }
      if (alive(packet.from) != nullptr) bag_.push_back(std::move(reply));
      break;
    }
    case Packet::Kind::kAudited: {
      Effects effects;
      for (const GlobalId& fork : packet.lost) here->table->lost(packet.asked.at(fork), fork, effects);
      apply(*here, std::move(effects));
      break;
    }
  }
  return true;
}

void RRefWorld::arrive_creation(Worker& here, const Packet& packet) {
  Value& value = value_of(packet.handle);
  auto fresh = std::make_shared<Object>(*this, here.id, by_id_.at({value.owner, value.id}));
  Effects effects;
  RRefTable::Keep kept;
  if (packet.from == here.id) {
    kept = here.table->owned().find(value.id);
    here.table->owned().own_creation_ended(value.id, effects);
  } else {
    kept = here.table->owned().creation_arrived(value.id, packet.handle.fork, fresh);
    if (!kept && !value.failed) fail("a creation was refused that its creator did not give up");
  }
  if (kept && !value.failed) {
    value.came = true;
    if (packet.from != here.id) books_.at(packet.handle.fork).known = true;
    auto object = std::static_pointer_cast<Object>(kept);
    object->payload = std::make_shared<int>(1);  // the failure, if it is one
    object->failed = object->failed || packet.failed;
    value.payload = object->payload;
    if (++value.made > 1) fail("a value was created twice");
  } else if (kept && packet.from != here.id) {
    fail("a creation counted that had failed before");
  }
  apply(here, std::move(effects));
  Packet reply{Packet::Kind::kCreated, here.id, packet.from};
  reply.handle = packet.handle;
  reply.failed = packet.failed;
  if (alive(packet.from) != nullptr) bag_.push_back(std::move(reply));
}

void RRefWorld::arrive_created(Worker& here, const Packet& packet) {
  const auto found = here.creating.find(packet.handle.fork);
  if (found == here.creating.end()) return;
  const ObjectPtr object = found->second;
  here.creating.erase(found);
  object->failed = object->failed || packet.failed;
  if (packet.to == packet.from) return;
  Effects effects;
  here.table->held().created(packet.handle.fork, effects);
  apply(here, std::move(effects));
}

void RRefWorld::arrive_carry(Worker& here, const Packet& packet) {
  const GlobalId fork = packet.handle.fork;
  Book& book = books_.at(fork);
  const bool was_protected = is_protected(book);
  if (here.table->held().is_missing(fork, packet.from)) {
    book.living = false;
    return;
  }
  auto object = std::make_shared<Object>(*this, here.id, book.value);
  Effects effects;
  bool refused = false;
  if (packet.handle.owner == here.id.rank) {
    auto found = here.table->receive_at_owner(packet.handle, packet.from, object, effects);
    book.living = false;
    refused = found.refusal.has_value();
    if (found.owner) object = std::static_pointer_cast<Object>(found.owner);
    if (refused) object->failed = true;
  } else {
    object->fork = fork;
    book.held = object;
    const auto refusal = here.table->held().adopt(packet.handle, packet.from, object, effects);
    refused = refusal.has_value();
    if (refused) object->failed = true;
  }
  if (refused && was_protected) fail("a reference that lives was refused where it arrived: " + str(fork));
  here.program.push_back(std::move(object));
  apply(here, std::move(effects));
}

void RRefWorld::arrive_control(Worker& here, const Packet& packet) {
  RRefMessage message = packet.message;
  if (message.kind != RRefMessage::Kind::kForkRequest) message.to = here.id;
  if (message.kind == RRefMessage::Kind::kGivenUp) {
    const auto known = by_id_.find({here.id, message.value});
    if (known != by_id_.end() && !values_[known->second].came && here.table->presence().present(packet.from))
      values_[known->second].failed = true;
  }
  Effects effects;
  const auto refusal = here.table->receive(message, packet.from, effects);
  if (message.kind == RRefMessage::Kind::kForkRequest) {
    Book& book = books_.at(message.fork);
    if (refusal && is_protected(book)) fail("the owner refused a reference that lives: " + str(message.fork));
    if (!refusal) {
      book.known = true;
      book.orphan = false;
    }
  }
  apply(here, std::move(effects));
  Packet reply{Packet::Kind::kAnswer, here.id, packet.from, packet.message, packet.number, !refusal};
  if (alive(packet.from) != nullptr) bag_.push_back(std::move(reply));
}

void RRefWorld::arrive_answer(Worker& here, const Packet& packet) {
  const auto before = here.unanswered.size();
  std::erase_if(here.unanswered, [&](const auto& one) { return one.first == packet.number; });
  if (here.unanswered.size() != before) answered(here, packet.message, packet.counted);
}

void RRefWorld::answered(Worker& worker, const RRefMessage& message, bool counted) {
  if (message.kind != RRefMessage::Kind::kForkRequest) return;
  const auto user = std::static_pointer_cast<Object>(worker.table->held().find(message.fork));
  Effects effects;
  worker.table->held().fork_answered(message.fork, counted, effects);
  if (user && !counted) user->failed = true;
  apply(worker, std::move(effects));
}

}  // namespace torchspan::rpc::testing
