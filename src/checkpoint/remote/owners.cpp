#include "checkpoint/remote/owners.h"

#include <exception>
#include <functional>
#include <span>

#include "checkpoint/remote/messages.h"

namespace torchspan::checkpoint {
namespace {

std::map<std::string, std::vector<RemoteItem>> by_owner(const Worker& worker, const RemoteValues& values) {
  std::map<std::string, std::vector<RemoteItem>> items;
  for (const auto& [name, value] : values)
    items[worker.info(static_cast<int>(value->owner())).name].push_back({value, name});
  return items;
}

}  // namespace

Owners::~Owners() { release(); }

std::string Owners::owner_of(const RemoteValue& value) const {
  return worker_.info(static_cast<int>(value->owner())).name;
}

Listing Owners::list(const RemoteValues& values) const {
  std::vector<std::pair<std::string, Future<std::string>>> replies;
  for (auto& [owner, items] : by_owner(worker_, values))
    replies.emplace_back(owner, worker_.request(owner, ListTensors{std::move(items)}, deadline()));
  Listing all;
  for (const auto& [owner, reply] : replies) {
    const std::string text = reply.wait();
    for (ListedPart& part : decode_listing(std::as_bytes(std::span(text)))) {
      part.owner = owner;
      all.push_back(std::move(part));
    }
  }
  return all;
}

void Owners::snapshot(const RemoteValues& values, const SaveJob& job, std::size_t rank) {
  release();
  auto items = by_owner(worker_, values);
  std::vector<Future<Unit>> replies;
  std::exception_ptr failure;
  const auto attempt = [&](const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  const auto send = [&](const Plan::Share& share) {
    TakeSnapshot message;
    message.id = worker_.endpoint()->next_id();
    message.items = std::move(items[share.owner]);
    for (std::size_t i = 0; i < share.entries.size(); ++i) {
      message.names.push_back(job.listings[rank][share.parts[i]].name);
      message.keys.push_back(share.entries[i].name);
    }
    snapshots_[share.owner] = message.id;
    replies.push_back(worker_.request(share.owner, message, deadline()));
  };
  for (const Plan::Share& share : job.plan.shares) {
    if (share.rank == rank && !share.owner.empty()) attempt([&] { send(share); });
  }
  // Waits for all of them: a snapshot that is dropped before it is taken would stay on its owner.
  for (const Future<Unit>& reply : replies) attempt([&] { reply.wait(); });
  if (failure) std::rethrow_exception(failure);
}

void Owners::release() noexcept {
  for (const auto& [owner, id] : snapshots_) {
    try {
      static_cast<void>(worker_.request(owner, DropSnapshot{id}, deadline()));
    } catch (const std::exception&) {
      continue;  // the owner died or left, and its snapshot is lost
    }
  }
  snapshots_.clear();
}

Future<std::string> Owners::write(const Plan::Share& share, const std::string& path) {
  const auto snapshot = snapshots_.extract(share.owner);
  if (snapshot.empty()) {
    return make_failed_future<std::string>(std::make_exception_ptr(
        Error(ErrorKind::kInvalid, "worker '" + share.owner + "' has no snapshot to write")));
  }
  return worker_.request(share.owner, WriteSnapshot{snapshot.mapped(), path}, deadline());
}

void Owners::load(const std::string& folder, const std::string& name, const RemoteValue& value) const {
  LoadTensors message{folder, {{value, name}}};
  worker_.request(owner_of(value), message, deadline()).wait();
}

}  // namespace torchspan::checkpoint
