#pragma once
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "rendezvous/store/store.h"

namespace torchspan::rendezvous {

inline constexpr TimePoint kStart{};

/// The first message of the worker of `rank`: worker<rank>, pid 100 + rank.
inline Register registration(int rank, int world_size) {
  Register message;
  message.job = "job";
  message.member.name = "worker" + std::to_string(rank);
  message.member.rank = rank;
  message.member.host = "node";
  message.member.pid = 100 + rank;
  message.world_size = world_size;
  message.functions = {"f()"};
  message.timeout = std::chrono::seconds(60);
  return message;
}

/// One change of a Changes message.
struct Joined {
  Member member;
};
struct Left {
  int rank = 0;
};
struct Died {
  int rank = 0;
  std::string how = {};
};

/// A store, and the messages that it sent to each connection. Unless open_with() is used, it announces
/// each change by itself.
class StoreFixture : public ::testing::Test {
 protected:
  void open(int world_size) { open(StoreOptions{world_size, "job"}); }
  void open(StoreOptions options) {
    options.announcements.per_worker = Duration::zero();
    open_with(std::move(options));
  }
  void open_with(StoreOptions options) {
    store_ = std::make_unique<Store>(
        std::move(options),
        Store::Connections{
            .send = [this](ConnectionId connection,
                           const SharedBytes& bytes) { sent_[connection].push_back(*bytes); },
            .close = [this](ConnectionId connection) { closed_.push_back(connection); },
        });
  }
  template <class Message>
  void say(ConnectionId connection, const Message& message, TimePoint now = kStart) {
    store_->on_message(connection, encode_message(message), now);
  }
  /// Without incarnations, names the first incarnation of every rank.
  void say(ConnectionId connection, Contribute message, TimePoint now = kStart) {
    if (message.incarnations.empty()) message.incarnations.resize(message.ranks.size());
    store_->on_message(connection, encode_message(message), now);
  }
  /// A complete world in which rank r uses connection r.
  void gather_world(int world_size) {
    open(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      say(static_cast<ConnectionId>(rank), registration(rank, world_size));
    }
    sent_.clear();
  }
  /// The messages of one type that `connection` received, or the changes of one kind.
  template <class Message>
  std::vector<Message> heard(ConnectionId connection) const {
    std::vector<Message> messages;
    if constexpr (!requires { Message::kType; }) {
      for (const Changes& changes : heard<Changes>(connection)) {
        for (const Changes::Change& change : changes.list) append(messages, change);
      }
      return messages;
    } else {
      return heard_messages<Message>(connection);
    }
  }
  template <class Message>
  std::vector<Message> heard_messages(ConnectionId connection) const {
    std::vector<Message> messages;
    const auto found = sent_.find(connection);
    if (found == sent_.end()) return messages;
    for (const Bytes& bytes : found->second) {
      ByteReader reader(bytes);
      if (reader.get<std::uint16_t>() == Message::kType) messages.push_back(decode_message<Message>(reader));
    }
    return messages;
  }
  static void append(std::vector<Joined>& list, const Changes::Change& change) {
    if (const auto* arrived = std::get_if<Arrived>(&change)) {
      for (const Member& member : arrived->members) list.push_back({member});
    }
  }
  static void append(std::vector<Left>& list, const Changes::Change& change) {
    const auto* departed = std::get_if<Departed>(&change);
    for (const int rank : departed && !departed->died ? departed->ranks : std::vector<int>())
      list.push_back({rank});
  }
  static void append(std::vector<Died>& list, const Changes::Change& change) {
    const auto* departed = std::get_if<Departed>(&change);
    for (const int rank : departed && departed->died ? departed->ranks : std::vector<int>())
      list.push_back({rank, departed->how});
  }
  std::string refusal(ConnectionId connection) const {
    const auto all = heard<Refused>(connection);
    return all.size() == 1 ? all[0].text : "heard " + std::to_string(all.size()) + " refusals";
  }
  std::string round_failure(ConnectionId connection) const {
    const auto all = heard<RoundFailed>(connection);
    return all.size() == 1 ? all[0].text : "heard " + std::to_string(all.size()) + " failures";
  }
  static Error closed() { return Error(ErrorKind::kDisconnected, "end of file"); }

  std::unique_ptr<Store> store_;
  std::map<ConnectionId, std::vector<Bytes>> sent_;
  std::vector<ConnectionId> closed_;
};

}  // namespace torchspan::rendezvous
