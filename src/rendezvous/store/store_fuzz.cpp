#include <algorithm>
#include <cstdlib>

#include "rendezvous/store/store.h"
#include "tests/support/fuzz_seeds.h"

/// The input is a sequence of messages, each after one byte for connection and time and one for the length.
/// Whatever they are, the store answers with messages that a client can decode, or throws Error{kInvalid}.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan;
  using namespace torchspan::rendezvous;
  MessageTable<> client;
  client.on<Welcome>([](Welcome) {});
  client.on<Refused>([](Refused) {});
  client.on<Gathered>([](Gathered) {});
  client.on<RoundFailed>([](RoundFailed) {});
  client.on<Farewell>([](Farewell) {});
  client.on<Changes>([](const Changes&) {});
  client.on<Summed>([](const Summed&) {});
  client.on<Missing>([](const Missing&) {});
  client.on<Ping>([](Ping) {});
  client.on<DeclaredDead>([](DeclaredDead) {});
  const bool open = size > 0 && (data[0] & 2) != 0;
  const int world_size = open ? kOpenWorld : 3;
  Store store({.world_size = world_size,
               .job = "",
               .heartbeats = {.interval = std::chrono::milliseconds(50),
                              .dead_after = std::chrono::milliseconds(200)}},
              {.send = [&](ConnectionId, const SharedBytes& bytes) { client.dispatch(*bytes); },
               .close = [](ConnectionId) {}});
  TimePoint now{};
  // Some worlds are open, some span hosts, and some are complete from the start, so that the later messages
  // are reached as well.
  if (size > 0 && (data[0] & 1) != 0) {
    for (int rank = 0; rank < 3; ++rank) {
      Register message;
      message.member.name = "worker" + std::to_string(rank);
      message.member.rank = rank;
      message.world_size = world_size;
      if (rank > 0 && (data[0] & 4) != 0) message.member.host_id = "elsewhere";
      store.on_message(static_cast<ConnectionId>(rank), encode_message(message), now);
    }
  }
  const BytesView bytes = std::as_bytes(std::span(data, size));
  for (std::size_t at = 1; at + 2 <= bytes.size();) {
    const ConnectionId connection = data[at] % 5;
    const std::size_t length = std::min<std::size_t>(data[at + 1], bytes.size() - at - 2);
    now += std::chrono::milliseconds(data[at] / 5);
    store.tick(now);
    try {
      store.on_message(connection, bytes.subspan(at + 2, length), now);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalid) std::abort();
      store.on_closed(connection, Error(ErrorKind::kDisconnected, "closed"), TimePoint{});
    }
    at += 2 + length;
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using namespace torchspan;
    using namespace torchspan::rendezvous;
    using testing::bytes_of, testing::joined;
    const auto from = [](int connection, const Bytes& message) {
      return joined({bytes_of({connection, static_cast<int>(message.size())}), message});
    };
    const auto entry = [](int rank, int size) {
      Register message;
      message.member.name = "worker" + std::to_string(rank);
      message.member.rank = rank;
      message.world_size = size;
      message.functions = {"f()"};
      message.timeout = std::chrono::seconds(1);
      return encode_message(message);
    };
    Contribute contribute;
    contribute.tag = "tag";
    contribute.ranks = {0, 1, 2};
    contribute.incarnations = {0, 0, 0};
    contribute.timeout = std::chrono::seconds(1);
    contribute.bytes = Bytes(3);
    Contribute counts = contribute;
    counts.counts = {1, 2};
    const Bytes sum = encode_message(counts), come = encode_message(contribute),
                leave = encode_message(Leave{}), pong = encode_message(Pong{});
    std::vector<Bytes> seeds;
    seeds.push_back(joined(
        {bytes_of({0}), from(0, entry(0, 3)), from(1, entry(1, 3)), from(2, entry(2, 3)), from(0, come)}));
    seeds.push_back(joined({bytes_of({1}), from(0, come), from(1, come), from(2, come), from(1, leave)}));
    seeds.push_back(joined(
        {bytes_of({2}), from(1, entry(kAnyRank, kOpenWorld)), from(0, entry(0, kOpenWorld)), from(1, pong)}));
    seeds.push_back(joined({bytes_of({3}), from(1, leave), from(3, entry(1, kOpenWorld)), from(3, come)}));
    seeds.push_back(joined({bytes_of({1}), from(0, sum), from(1, sum), from(2, sum), from(1, leave)}));
    // A newer neighbor: fields and a message that this release does not know.
    Register newer;
    newer.versions = {kStoreProtocol.newest, kStoreProtocol.newest + 1, 0};
    newer.member.name = "worker1";
    newer.member.rank = 1;
    newer.world_size = kOpenWorld;
    const Bytes longer = joined({encode_message(newer), bytes_of({1, 2, 3})});
    seeds.push_back(joined({bytes_of({2}), from(0, entry(0, kOpenWorld)), from(1, longer),
                            from(1, bytes_of({0, 9, 1})), from(1, joined({leave, bytes_of({4})}))}));
    seeds.push_back(joined({bytes_of({5}), from(251, pong), from(252, pong), from(3, entry(1, 3))}));
    return seeds;
  });
}
