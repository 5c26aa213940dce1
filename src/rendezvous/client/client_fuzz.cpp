#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>

#include "rendezvous/client/client.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::rendezvous;

class DiscardingChannel final : public net::Channel {
 public:
  void send(BytesView, std::span<const Segment>) override {}
  std::size_t unsent_bytes() const override { return 0; }
  void close() override { closed = true; }
  std::string peer() const override { return "store"; }
  std::atomic<bool> closed{false};
};

/// A transport whose store sends the given messages, ignores what it receives, and then disconnects.
class ScriptedTransport final : public net::Transport {
 public:
  ScriptedTransport(Executor& executor, net::Handler& handler, std::deque<Bytes> words, Parker& done)
      : handler_(handler), words_(std::move(words)), done_(done), sleeper_(executor.make_parker()) {}

  std::string listen(const std::string& address) override { return address; }
  bool can_reach(const std::string&) const override { return true; }
  std::shared_ptr<net::Channel> connect(const std::string&, Deadline) override {
    return channel_ = std::make_shared<DiscardingChannel>();
  }
  bool poll() override {
    if (!channel_ || departed_) return false;
    if (words_.empty() || channel_->closed) {
      departed_ = true;
      handler_.on_closed(channel_, Error(ErrorKind::kDisconnected, "the store is gone"));
      done_.unpark();
      return true;
    }
    net::Message message;
    message.header = std::move(words_.front());
    words_.pop_front();
    handler_.on_message(channel_, std::move(message));
    return true;
  }
  void wait(Deadline deadline) override { sleeper_->park(deadline); }
  void wake() override { sleeper_->unpark(); }

 private:
  net::Handler& handler_;
  std::deque<Bytes> words_;
  Parker& done_;
  const std::unique_ptr<Parker> sleeper_;
  std::shared_ptr<DiscardingChannel> channel_;
  bool departed_ = false;
};

/// Decodes a message and checks that its encoding decodes to the same message.
template <class Message>
void check_codec(MessageTable<>& table) {
  table.on<Message>([](Message message) {
    const Bytes once = encode_message(message);
    ByteReader reader(once);
    reader.get<std::uint16_t>();
    if (encode_message(decode_message<Message>(reader)) != once || !reader.at_end()) std::abort();
  });
}

void check_codecs(BytesView bytes) {
  MessageTable<> table;
  check_codec<Register>(table);
  check_codec<Welcome>(table);
  check_codec<Refused>(table);
  check_codec<Contribute>(table);
  check_codec<Gathered>(table);
  check_codec<RoundFailed>(table);
  check_codec<Changes>(table);
  check_codec<Summed>(table);
  check_codec<Missing>(table);
  check_codec<Ping>(table);
  check_codec<DeclaredDead>(table);
  try {
    table.dispatch(bytes);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kInvalid) std::abort();
  }
}

Member self() {
  Member member;
  member.name = "worker1";
  member.rank = 1;
  return member;
}

}  // namespace

/// The input is a sequence of messages from the store, each after a u16 with its length. Whatever they are,
/// the worker must not crash, and must know itself in the world that it received.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const std::unique_ptr<Executor> executor = make_executor();
  std::deque<Bytes> words;
  const BytesView bytes = std::as_bytes(std::span(data, size));
  for (std::size_t at = 0; at + 2 <= bytes.size();) {
    const std::size_t length = std::min<std::size_t>(data[at] + 256u * data[at + 1], bytes.size() - at - 2);
    const BytesView word = bytes.subspan(at + 2, length);
    check_codecs(word);
    words.emplace_back(word.begin(), word.end());
    at += 2 + length;
  }
  Runtime runtime(*executor, "worker1", LogLevel::kOff);
  const auto done = executor->make_parker();
  const TransportFactory silent_transport = [&](const std::string&, net::Handler& handler) {
    return std::make_unique<ScriptedTransport>(*executor, handler, words, *done);
  };
  MembershipOptions options;
  options.name = "worker1";
  options.rank = 1;
  options.world_size = 3;
  std::atomic<int> called_back{0};
  int begun = 0;
  {
    Client client(runtime, silent_transport, options, self());
    client.watch({.joined = [](const Member& member) { describe(member); },
                  .died = [](const Member& member, const Error&) { describe(member); },
                  .left = [](const Member& member) { describe(member); }});
    try {
      client.rounds().gather_async(client.contribution("tag", {}, {0, 1, 2}, Deadline::never()),
                                   [&](std::vector<Bytes>, std::optional<Error>) { ++called_back; });
      ++begun;
    } catch (const Error&) {  // the script has ended the connection
    }
    done->park(Deadline::never());
    for (const Member& member : client.members()) {
      if (!client.find(member.rank)) std::abort();
    }
    const Deadline passed = executor->deadline_in(Duration(0) - std::chrono::seconds(2));
    try {
      client.rounds().gather("gather 0", client.contribution("tag", {}, {0, 1, 2}, passed),
                             {.until = passed});
      std::abort();
    } catch (const Error&) {
    }
    client.end_part(Error(ErrorKind::kCancelled, "the run is over"));
  }
  if (called_back != begun) std::abort();
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return testing::offer_seeds(count, arguments, [] {
    const auto word = [](const auto& message) {
      const Bytes bytes = encode_message(message);
      return testing::joined(
          {testing::bytes_of({static_cast<int>(bytes.size() % 256), static_cast<int>(bytes.size() / 256)}),
           bytes});
    };
    Welcome welcome;
    for (int rank = 0; rank < 3; ++rank) {
      Member member = self();
      member.name = "worker" + std::to_string(rank);
      member.rank = rank;
      welcome.members.push_back(member);
    }
    Welcome with_departed = welcome;
    with_departed.departed = {{{2}, true, " died"}, {{0}, false, ""}};
    Member again = welcome.members[2];
    again.incarnation = 1;
    Changes news;
    news.add(Departed{{2}, true, " died: why"});
    news.add(Arrived{{again}});
    Gathered gathered{.call = 0, .runs = {}};
    for (Bytes bytes : {Bytes(2), Bytes(), Bytes()}) gathered.add(std::move(bytes));
    std::vector<Bytes> seeds;
    for (const Welcome& one : {welcome, with_departed}) {
      seeds.push_back(testing::joined({word(Ping{std::chrono::seconds(5)}), word(one), word(news)}));
      seeds.push_back(testing::joined(
          {word(one), word(Changes{{Departed{{0, 2}}}}), word(gathered), word(DeclaredDead{"silent"})}));
      seeds.push_back(testing::joined({word(one), word(RoundFailed{0, ErrorKind::kTimedOut, "late"}),
                                       word(Summed{0, {{7}, {{1, Bytes(1)}}, 1}}),
                                       word(Missing{0, {0, 1, 2}}), word(Farewell{})}));
    }
    seeds.push_back(word(Refused{ErrorKind::kInvalid, "no"}));
    Welcome of_newer = welcome;
    of_newer.versions = {kStoreProtocol.newest, kStoreProtocol.newest + 1, 0};
    seeds.push_back(testing::joined({word(of_newer), testing::bytes_of({3, 0, 0, 9, 1}),
                                     word(Changes{{Arrived{{again}}, Departed{{2}}}})}));
    Register entry;
    entry.member = self();
    entry.functions = {"f()"};
    seeds.push_back(testing::joined(
        {word(entry), word(Contribute{1, "tag", {0, 1}, 2, std::chrono::seconds(1), Bytes(2), {0, 0}})}));
    return seeds;
  });
}
