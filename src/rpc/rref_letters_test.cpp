// What the workers of an RRefWorld do with what arrives.
#include "rpc/rref_world.h"

namespace torchspan::rpc::testing {

using Effects = RRefTable::Effects;

bool RRefWorld::deliver(std::size_t index) {
  if (bag_.empty()) return false;
  index %= bag_.size();
  Worker* here = alive(bag_[index].to);
  const bool by_rank = bag_[index].kind == Letter::Kind::kControl || bag_[index].kind == Letter::Kind::kAudit;
  if (here == nullptr && by_rank) {  // whoever has the rank now may get it, if its sender knows that one
    Worker* sender = alive(bag_[index].from);
    here = &at(bag_[index].to.rank);
    if (!here->alive || sender == nullptr || !sender->table->presence().present(here->id)) here = nullptr;
  }
  if (here != nullptr && here->table->presence().of(bag_[index].from) == Presence::Standing::kUnknown)
    return false;  // it waits until its sender is known to have joined
  const Letter letter = std::move(bag_[index]);
  bag_.erase(bag_.begin() + static_cast<std::ptrdiff_t>(index));
  if (here == nullptr) return true;
  switch (letter.kind) {
    case Letter::Kind::kControl:
      arrive_control(*here, letter);
      break;
    case Letter::Kind::kAnswer:
      arrive_answer(*here, letter);
      break;
    case Letter::Kind::kCreate:
      arrive_creation(*here, letter);
      break;
    case Letter::Kind::kCreated:
      arrive_created(*here, letter);
      break;
    case Letter::Kind::kCarry:
      arrive_carry(*here, letter);
      break;
    case Letter::Kind::kAudit: {
      std::vector<GlobalId> forks;
      for (const auto& [fork, value] : letter.asked) forks.push_back(fork);
      Letter reply{Letter::Kind::kAudited, letter.to, letter.from};
      reply.asked = letter.asked;
      reply.lost = here->table->held().missing(forks, letter.from);
      for (const GlobalId& fork : reply.lost) {
        Book& book = books_.at(fork);
        if (is_protected(book) && !book.held.expired() && book.holder == here->id)
          fail("a reference that is here was said to be lost: " + str(fork));
        book.living = false;  // should it come after all, it is refused
      }
      if (alive(letter.from) != nullptr) bag_.push_back(std::move(reply));
      break;
    }
    case Letter::Kind::kAudited: {
      Effects effects;
      for (const GlobalId& fork : letter.lost) here->table->lost(letter.asked.at(fork), fork, effects);
      apply(*here, std::move(effects));
      break;
    }
  }
  return true;
}

void RRefWorld::arrive_creation(Worker& here, const Letter& letter) {
  Value& value = value_of(letter.handle);
  auto fresh = std::make_shared<Object>(*this, here.id, by_id_.at({value.owner, value.id}));
  Effects effects;
  RRefTable::Keep kept;
  if (letter.from == here.id) {
    kept = here.table->owned().find(value.id);
    here.table->owned().own_creation_ended(value.id, effects);
  } else {
    kept = here.table->owned().creation_came(value.id, letter.handle.fork, fresh);
    if (!kept && !value.failed) fail("a creation was refused that nobody gave up");
  }
  if (kept && !value.failed) {
    value.came = true;
    if (letter.from != here.id) books_.at(letter.handle.fork).known = true;
    auto object = std::static_pointer_cast<Object>(kept);
    object->payload = std::make_shared<int>(1);  // the failure, if it is one
    object->failed = object->failed || letter.failed;
    value.payload = object->payload;
    if (++value.made > 1) fail("a value was created twice");
  } else if (kept && letter.from != here.id) {
    fail("a creation counted that had failed before");
  }
  apply(here, std::move(effects));
  Letter reply{Letter::Kind::kCreated, here.id, letter.from};
  reply.handle = letter.handle;
  reply.failed = letter.failed;
  if (alive(letter.from) != nullptr) bag_.push_back(std::move(reply));
}

void RRefWorld::arrive_created(Worker& here, const Letter& letter) {
  const auto found = here.creating.find(letter.handle.fork);
  if (found == here.creating.end()) return;
  const ObjectPtr object = found->second;
  here.creating.erase(found);
  object->failed = object->failed || letter.failed;
  if (letter.to == letter.from) return;
  Effects effects;
  here.table->held().created(letter.handle.fork, effects);
  apply(here, std::move(effects));
}

void RRefWorld::arrive_carry(Worker& here, const Letter& letter) {
  const GlobalId fork = letter.handle.fork;
  Book& book = books_.at(fork);
  const bool was_protected = is_protected(book);
  if (here.table->held().is_missing(fork, letter.from)) {
    book.living = false;
    return;
  }
  auto object = std::make_shared<Object>(*this, here.id, book.value);
  Effects effects;
  bool refused = false;
  if (letter.handle.owner == here.id.rank) {
    auto found = here.table->come_home(letter.handle, letter.from, object, effects);
    book.living = false;
    refused = found.refusal.has_value();
    if (found.owner) object = std::static_pointer_cast<Object>(found.owner);
    if (refused) object->failed = true;
  } else {
    object->fork = fork;
    book.held = object;
    const auto refusal = here.table->held().adopt(letter.handle, letter.from, object, effects);
    refused = refusal.has_value();
    if (refused) object->failed = true;
  }
  if (refused && was_protected) fail("a reference that lives was refused where it arrived: " + str(fork));
  here.program.push_back(std::move(object));
  apply(here, std::move(effects));
}

void RRefWorld::arrive_control(Worker& here, const Letter& letter) {
  RRefMessage message = letter.message;
  if (message.kind != RRefMessage::Kind::kForkRequest) message.to = here.id;
  if (message.kind == RRefMessage::Kind::kGivenUp) {
    const auto known = by_id_.find({here.id, message.value});
    if (known != by_id_.end() && !values_[known->second].came && here.table->presence().present(letter.from))
      values_[known->second].failed = true;
  }
  Effects effects;
  const auto refusal = here.table->receive(message, letter.from, effects);
  if (message.kind == RRefMessage::Kind::kForkRequest) {
    Book& book = books_.at(message.fork);
    if (refusal && is_protected(book)) fail("the owner refused a reference that lives: " + str(message.fork));
    if (!refusal) {
      book.known = true;
      book.orphan = false;
    }
  }
  apply(here, std::move(effects));
  Letter reply{Letter::Kind::kAnswer, here.id, letter.from, letter.message, letter.number, !refusal};
  if (alive(letter.from) != nullptr) bag_.push_back(std::move(reply));
}

void RRefWorld::arrive_answer(Worker& here, const Letter& letter) {
  const auto before = here.unanswered.size();
  std::erase_if(here.unanswered, [&](const auto& one) { return one.first == letter.number; });
  if (here.unanswered.size() != before) answered(here, letter.message, letter.counted);
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
