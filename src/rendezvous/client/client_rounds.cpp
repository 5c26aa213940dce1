#include "rendezvous/client/client_rounds.h"

#include <fmt/format.h>

#include "core/api/saturated_time.h"
#include "core/api/step_part.h"

namespace torchspan::rendezvous {
namespace {

/// After this time, a wait is an open operation of its worker.
constexpr Duration kListedAfter = std::chrono::seconds(1);

}  // namespace

Deadline with_grace(Deadline deadline) {
  constexpr Duration kVerdictGrace = std::chrono::seconds(2);
  return deadline_after(deadline.at(), kVerdictGrace);
}

ClientRounds::ClientRounds(Runtime& runtime, std::string store_address, Send send,
                           IncarnationOf incarnation_of)
    : runtime_(runtime),
      store_address_(std::move(store_address)),
      send_(std::move(send)),
      incarnation_of_(std::move(incarnation_of)) {}

std::vector<Bytes> ClientRounds::gather(const std::string& call, Contribute message,
                                        const Membership::Wait& wait) {
  return std::move(take_part(call, std::move(message), wait)->bytes);
}

CountSums ClientRounds::sum(const std::string& call, Contribute message, const Membership::Wait& wait) {
  return std::move(take_part(call, std::move(message), wait)->sums);
}

std::shared_ptr<ClientRounds::Slot> ClientRounds::take_part(const std::string& call, Contribute message,
                                                            const Membership::Wait& wait) {
  const auto slot = std::make_shared<Slot>();
  slot->name = call;
  slot->parker = runtime_.executor.make_parker();
  const std::uint64_t number = contribute(std::move(message), slot);
  try {
    wait_for(number, *slot, wait);
    return slot;
  } catch (...) {
    forget(number);
    throw;
  }
}

void ClientRounds::gather_async(Contribute message, Membership::GatherCallback done) {
  const auto slot = std::make_shared<Slot>();
  slot->callback = std::move(done);
  contribute(std::move(message), slot);
}

std::uint64_t ClientRounds::contribute(Contribute message, const std::shared_ptr<Slot>& slot) {
  {
    MutexLock lock(mutex_);
    if (cancelled_) throw Error(*cancelled_);
    message.call = next_call_++;
    numbers_.number(message, incarnation_of_);
    slot->link = {.id = message.round + 1, .part = group_number(message.ranks.list())};
    slot->ranks = message.ranks.size();
    slots_[message.call] = slot;
  }
  try {
    send_(encode_message(message));
  } catch (const Error& error) {
    // If the connection broke, cancel() ends the call with the reason.
    if (error.kind() == ErrorKind::kDisconnected) return message.call;
    forget(message.call);
    throw;
  }
  return message.call;
}

void ClientRounds::wait_for(std::uint64_t call, Slot& slot, const Membership::Wait& wait) {
  const Executor& executor = runtime_.executor;
  const Deadline until = with_grace(wait.until);
  const bool reports = wait.report && wait.every > Duration::zero();
  Deadline ask_at = reports ? executor.deadline_in(wait.every) : Deadline::never();
  Deadline list_at = executor.deadline_in(kListedAfter);
  std::optional<SpanScope> listed;
  bool asked = false;
  while (true) {
    slot.parker->park(earlier(until, earlier(ask_at, list_at)));
    std::vector<Member> missing;
    {
      MutexLock lock(mutex_);
      if (slot.done) {
        if (slot.error) throw Error(*slot.error);
        return;
      }
      missing = std::exchange(slot.missing, std::nullopt).value_or(std::vector<Member>());
    }
    if (!missing.empty()) {
      asked = false;
      wait.report(missing);
    }
    if (until.passed(executor.now())) break;
    if (list_at.passed(executor.now())) {
      listed.emplace(runtime_.spans, SpanKind::kWait, slot.name, slot.link);
      list_at = Deadline::never();
    }
    if (!ask_at.passed(executor.now())) continue;
    if (std::exchange(asked, true) && wait.no_answer) wait.no_answer();
    ask_at = executor.deadline_in(wait.every);
    ask_missing(call);
  }
  throw Error(ErrorKind::kTimedOut, fmt::format("the store at {} does not answer", store_address_));
}

void ClientRounds::ask_missing(std::uint64_t call) {
  try {
    send_(encode_message(AskMissing{call}));
  } catch (const Error& error) {  // cancel() ends the wait, or the next turn repeats the request
    runtime_.log.debug(
        fmt::format("the store could not be asked which ranks are missing: {}", error.message()));
  }
}

void ClientRounds::forget(std::uint64_t call) {
  MutexLock lock(mutex_);
  slots_.erase(call);
}

void ClientRounds::replaced() {
  MutexLock lock(mutex_);
  numbers_.replaced();
}

void ClientRounds::complete(const Gathered& message) {
  finish(message.call, [&](Slot& slot) { slot.bytes = message.all(slot.ranks); });
}

void ClientRounds::complete(Summed message) {
  finish(message.call, [&](Slot& slot) { slot.sums = std::move(message.sums); });
}

void ClientRounds::fail(std::uint64_t call, const Error& reason) {
  finish(call, [&](Slot& slot) { slot.error = reason; });
}

void ClientRounds::finish(std::uint64_t call, const std::function<void(Slot&)>& fill) {
  std::shared_ptr<Slot> slot;
  {
    MutexLock lock(mutex_);
    const auto found = slots_.find(call);
    if (found == slots_.end()) return;
    slot = found->second;
    fill(*slot);  // if it throws, cancel() ends the call
    slots_.erase(found);
    slot->done = true;
    if (slot->parker) slot->parker->unpark();
  }
  if (slot->callback) call_back(*slot);
}

void ClientRounds::call_back(Slot& slot) const {
  try {
    slot.callback(std::move(slot.bytes), std::move(slot.error));
  } catch (...) {
    runtime_.log.error(fmt::format("the callback of a gather threw: {}",
                                   torchspan::describe(std::current_exception()).text));
  }
}

void ClientRounds::set_missing(std::uint64_t call, std::vector<Member> missing) {
  MutexLock lock(mutex_);
  const auto found = slots_.find(call);
  if (found == slots_.end() || !found->second->parker) return;
  found->second->missing = std::move(missing);
  found->second->parker->unpark();
}

void ClientRounds::cancel(const Error& reason, const Error& later) {
  std::map<std::uint64_t, std::shared_ptr<Slot>> ended;
  {
    MutexLock lock(mutex_);
    cancelled_ = later;
    ended.swap(slots_);
    for (const auto& [call, slot] : ended) {
      slot->done = true;
      slot->error = reason;
      if (slot->parker) slot->parker->unpark();
    }
  }
  for (const auto& [call, slot] : ended) {
    if (slot->callback) call_back(*slot);
  }
}

}  // namespace torchspan::rendezvous
