#include <fmt/format.h>

#include "rendezvous/client/client.h"

namespace torchspan::rendezvous {

Deadline with_grace(Deadline deadline) {
  constexpr Duration kVerdictGrace = std::chrono::seconds(2);
  return deadline.is_never() ? deadline : Deadline(deadline.at() + kVerdictGrace);
}

void Client::cancel_slots(const Error& reason) {
  for (auto& [call, slot] : slots_) {
    slot->done = true;
    slot->error = reason;
    slot->parker->unpark();
  }
  slots_.clear();
}

void Client::finish_slot(std::uint64_t call, const std::function<void(Slot&)>& fill) {
  MutexLock lock(mutex_);
  const auto found = slots_.find(call);
  if (found == slots_.end()) return;  // its caller has ended the wait
  const auto slot = std::move(found->second);
  slots_.erase(found);
  fill(*slot);
  slot->done = true;
  slot->parker->unpark();
}

std::vector<Bytes> Client::gather(const std::string& tag, BytesView mine, std::vector<int> ranks,
                                  const Membership::Wait& wait) {
  Contribute message;
  message.tag = tag;
  message.ranks = std::move(ranks);
  message.bytes.assign(mine.begin(), mine.end());
  return std::move(take_part(std::move(message), wait)->bytes);
}

CountSums Client::sum(const std::string& tag, std::vector<std::uint64_t> counts, BytesView note,
                      std::vector<int> ranks, const Membership::Wait& wait) {
  Contribute message;
  message.tag = tag;
  message.ranks = std::move(ranks);
  message.bytes.assign(note.begin(), note.end());
  message.counts = std::move(counts);
  return std::move(take_part(std::move(message), wait)->sums);
}

std::shared_ptr<Client::Slot> Client::take_part(Contribute message, const Membership::Wait& wait) {
  const auto slot = std::make_shared<Slot>();
  slot->parker = runtime_.executor.make_parker();
  slot->ranks = message.ranks.size();
  message.timeout = wait.until.left(runtime_.executor.now());
  std::shared_ptr<net::Channel> channel;
  {
    MutexLock lock(mutex_);
    if (leaving_) throw Error(ErrorKind::kCancelled, "this worker has left the world");
    if (store_gone_) throw Error(*store_gone_);
    message.call = next_call_++;
    rounds_.number(message, [this](int rank) TORCHSPAN_REQUIRES(mutex_) {
      const auto found = known_.find(rank);
      return found == known_.end() ? 0 : found->second.member.incarnation;
    });
    slots_[message.call] = slot;
    channel = channel_;
  }
  const auto forget = [&] {
    MutexLock lock(mutex_);
    slots_.erase(message.call);
  };
  try {
    if (channel) channel->send(encode_message(message), {});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDisconnected) {
      forget();
      throw;
    }  // else on_store_gone() ends the wait with the reason
  }
  try {
    wait_for(message.call, *slot, wait);
    return slot;
  } catch (...) {
    forget();
    throw;
  }
}

void Client::wait_for(std::uint64_t call, Slot& slot, const Membership::Wait& wait) {
  const Executor& executor = runtime_.executor;
  const Deadline until = with_grace(wait.until);
  const bool reports = wait.report && wait.every > Duration::zero();
  Deadline ask_at = reports ? executor.deadline_in(wait.every) : Deadline::never();
  while (true) {
    slot.parker->park(earlier(until, ask_at));
    std::vector<Member> missing;
    {
      MutexLock lock(mutex_);
      if (slot.done) {
        if (slot.error) throw Error(*slot.error);
        return;
      }
      for (const int rank : std::exchange(slot.missing, std::nullopt).value_or(std::vector<int>())) {
        if (const auto known = known_.find(rank); known != known_.end())
          missing.push_back(known->second.member);
      }
    }
    if (!missing.empty()) wait.report(missing);
    if (until.passed(executor.now())) break;
    if (!ask_at.passed(executor.now())) continue;
    ask_at = executor.deadline_in(wait.every);
    ask_missing(call);
  }
  throw Error(ErrorKind::kTimedOut, fmt::format("the store at {} does not answer", options_.store_address));
}

void Client::ask_missing(std::uint64_t call) {
  std::shared_ptr<net::Channel> channel;
  {
    MutexLock lock(mutex_);
    channel = channel_;
  }
  try {
    if (channel) channel->send(encode_message(AskMissing{call}), {});
  } catch (const Error& error) {  // on_store_gone() ends the wait, or the next turn repeats the request
    runtime_.log.debug(
        fmt::format("the store could not be asked which ranks are missing: {}", error.message()));
  }
}

}  // namespace torchspan::rendezvous
