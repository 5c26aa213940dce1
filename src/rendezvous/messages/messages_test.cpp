#include "rendezvous/messages/messages.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>

namespace torchspan::rendezvous::messages_test {
namespace {

Member make_member(int rank) {
  Member member;
  member.name = "worker" + std::to_string(rank);
  member.rank = rank;
  member.address = "unix:/run/" + member.name;
  member.instance = 0x123456789abcdef0ULL + static_cast<std::uint64_t>(rank);
  member.host = "node";
  member.host_id = "boot";
  member.pid = 1000 + rank;
  member.uid = 7;
  member.start_ticks = 5555;
  member.functions_digest = 99;
  member.incarnation = 4;
  member.wire = {2, 3, 0x80000001};
  return member;
}

Bytes bytes_of(std::string_view text) {
  const auto raw = std::as_bytes(std::span(text.data(), text.size()));
  return Bytes(raw.begin(), raw.end());
}

template <class Message>
Message round_trip(const Message& message) {
  const Bytes bytes = encode_message(message);
  ByteReader reader(bytes);
  EXPECT_EQ(reader.get<std::uint16_t>(), Message::kType);
  Message back = decode_message<Message>(reader);
  reader.expect_end();
  EXPECT_EQ(encode_message(back), bytes);
  return back;
}

/// One message of each type, with every field set.
std::vector<Bytes> examples() {
  return {
      encode_message(Register{
          kStoreProtocol, "job", make_member(3), 4, true, {"f(int)", "g()"}, std::chrono::seconds(3)}),
      encode_message(Welcome{{make_member(0), make_member(1)}, {{{1}, true, "killed"}}}),
      encode_message(Refused{ErrorKind::kDenied, "no"}),
      encode_message(
          Contribute{9, "tag", {0, 2, 3}, 5, std::chrono::seconds(1), bytes_of("mine"), {0, 7, 1}}),
      encode_message(Contribute{9, "tag", {0, 2, 4}, 5, std::chrono::seconds(1), {}, {0, 0, 0}, {7, 8}}),
      encode_message(Gathered{9, {{1, bytes_of("a")}, {3, {}}, {1, bytes_of("c")}}}),
      encode_message(Summed{9, {{1, 2}, {{3, bytes_of("note")}}, 5}}),
      encode_message(RoundFailed{9, ErrorKind::kTimedOut, "late"}),
      encode_message(Leave{}),
      encode_message(Farewell{}),
      encode_message(
          Changes{{Departed{{3}}, Departed{{1, 2, 4}, true, "killed"}, Arrived{{make_member(5)}}}}),
      encode_message(Ping{std::chrono::seconds(5)}),
      encode_message(Pong{}),
      encode_message(DeclaredDead{"silent"}),
      encode_message(AskMissing{7}),
      encode_message(Missing{7, {0, 5}}),
      encode_message(GiveUp{"left because of something"}),
  };
}

/// A table that ignores every message.
MessageTable<> full_table() {
  MessageTable<> table;
  table.on<Register>([](Register) {});
  table.on<Welcome>([](Welcome) {});
  table.on<Refused>([](Refused) {});
  table.on<Contribute>([](Contribute) {});
  table.on<Gathered>([](Gathered) {});
  table.on<RoundFailed>([](RoundFailed) {});
  table.on<Leave>([](Leave) {});
  table.on<Farewell>([](Farewell) {});
  table.on<Changes>([](const Changes&) {});
  table.on<Summed>([](const Summed&) {});
  table.on<Ping>([](Ping) {});
  table.on<Pong>([](Pong) {});
  table.on<DeclaredDead>([](DeclaredDead) {});
  table.on<AskMissing>([](AskMissing) {});
  table.on<Missing>([](Missing) {});
  table.on<GiveUp>([](GiveUp) {});
  return table;
}

TEST(StoreMessages, KeepEveryFieldOfARegistration) {
  const Member member = make_member(3);
  const auto back = round_trip(
      Register{kStoreProtocol, "job", member, 4, true, {"f(int)", "g()"}, std::chrono::milliseconds(1500)});
  EXPECT_EQ(back.job, "job");
  EXPECT_EQ(back.member.name, member.name);
  EXPECT_EQ(back.member.rank, 3);
  EXPECT_EQ(back.member.address, member.address);
  EXPECT_EQ(back.member.instance, member.instance);
  EXPECT_EQ(back.member.host, "node");
  EXPECT_EQ(back.member.host_id, "boot");
  EXPECT_EQ(back.member.pid, 1003);
  EXPECT_EQ(back.member.uid, 7);
  EXPECT_EQ(back.member.start_ticks, 5555u);
  EXPECT_EQ(back.member.functions_digest, 99u);
  EXPECT_EQ(back.member.incarnation, 4u);
  EXPECT_EQ(back.member.wire, member.wire);
  EXPECT_EQ(back.world_size, 4);
  EXPECT_TRUE(back.require_same_functions);
  EXPECT_EQ(back.functions, (std::vector<std::string>{"f(int)", "g()"}));
  EXPECT_EQ(back.timeout, std::chrono::milliseconds(1500));
}

TEST(StoreMessages, KeepRoundsAndTheirBytes) {
  const auto contribute =
      round_trip(Contribute{9, "tag", {0, 2, 3}, 5, Duration::max(), bytes_of("mine"), {0, 7, 1}});
  EXPECT_EQ(contribute.call, 9u);
  EXPECT_EQ(contribute.tag, "tag");
  EXPECT_EQ(contribute.round, 5u);
  EXPECT_EQ(contribute.ranks, (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(contribute.timeout, Duration::max());
  EXPECT_EQ(contribute.bytes, bytes_of("mine"));
  EXPECT_EQ(contribute.incarnations, (std::vector<std::uint32_t>{0, 7, 1}));
  Gathered answer{9, {}};
  for (const char* text : {"a", "", "", "c"}) answer.add(bytes_of(text));
  EXPECT_EQ(answer.runs.size(), 3u);
  const auto gathered = round_trip(answer);
  EXPECT_EQ(gathered.all(4), (std::vector<Bytes>{bytes_of("a"), {}, {}, bytes_of("c")}));
  EXPECT_THROW(gathered.all(3), Error);
  const auto summed = round_trip(Summed{9, {{1, 2}, {{3, bytes_of("note")}}, 5}}).sums;
  EXPECT_EQ(summed.counts, (std::vector<std::uint64_t>{1, 2}));
  ASSERT_EQ(summed.notes.size(), 1u);
  EXPECT_EQ(summed.notes[0].rank, 3);
  EXPECT_EQ(summed.notes[0].bytes, bytes_of("note"));
  EXPECT_EQ(summed.noted, 5u);
  EXPECT_EQ(round_trip(RoundFailed{9, ErrorKind::kTimedOut, "late"}).kind, ErrorKind::kTimedOut);
}

TEST(StoreMessages, KeepDepartedAndJoinedWorkers) {
  const auto welcome = round_trip(Welcome{{make_member(0), make_member(1)}, {{{1}, true, "killed"}}});
  ASSERT_EQ(welcome.departed.size(), 1u);
  EXPECT_EQ(welcome.departed[0].ranks, std::vector<int>{1});
  EXPECT_TRUE(welcome.departed[0].died);
  EXPECT_EQ(welcome.departed[0].how, "killed");
  const Ping ping = round_trip(Ping{std::chrono::seconds(5), TimePoint(Duration(7))});
  EXPECT_EQ(ping.dead_after, std::chrono::seconds(5));
  EXPECT_EQ(ping.sent, TimePoint(Duration(7)));
  const Pong pong = round_trip(Pong{TimePoint(Duration(7)), TimePoint(Duration(8)), TimePoint(Duration(9))});
  EXPECT_EQ(pong.sent, TimePoint(Duration(7)));
  EXPECT_EQ(pong.received, TimePoint(Duration(8)));
  EXPECT_EQ(pong.answered, TimePoint(Duration(9)));
  EXPECT_EQ(round_trip(DeclaredDead{"silent"}).reason, "silent");
}

TEST(StoreMessages, AllowAMissingRankOnlyInARegistration) {
  Register request{kStoreProtocol, "job", make_member(kAnyRank), kOpenWorld, true, {}, {}};
  EXPECT_EQ(round_trip(request).member.rank, kAnyRank);
  EXPECT_THROW(full_table().dispatch(encode_message(Changes{{Arrived{{make_member(kAnyRank)}}}})), Error);
  request.member.rank = kAnyRank - 1;
  EXPECT_THROW(full_table().dispatch(encode_message(request)), Error);
}

TEST(StoreMessages, ReadOnlyTheVersionOfAnotherVersion) {
  ByteWriter writer;
  writer.put(Register::kType);
  const ProtocolRange later{kStoreProtocol.newest + 4, kStoreProtocol.newest + 5, 0};
  put_range(writer, later);
  writer.put_string("whatever it says there");
  MessageTable<> table;
  ProtocolRange versions;
  table.on<Register>([&](Register message) { versions = message.versions; });
  table.dispatch(writer.bytes());
  EXPECT_EQ(versions, later);
}

/// What the next version may add: fields at the end of a message, and of the member in a registration.
Bytes with_added_fields(Bytes bytes) {
  ByteReader type(bytes);
  const std::string name = "worker";
  const auto at = std::search(bytes.begin(), bytes.end(), name.begin(), name.end(),
                              [](std::byte a, char b) { return static_cast<char>(a) == b; });
  if (type.get<std::uint16_t>() == Register::kType && at != bytes.end()) {
    // The sizes of the member and of its name precede the name.
    const auto size_at = static_cast<std::size_t>(at - bytes.begin()) - 8;
    ByteReader reader(BytesView(bytes).subspan(size_at));
    const auto size = reader.get<std::uint32_t>();
    bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(size_at + 4 + size), 3, std::byte{0xEE});
    ByteWriter writer(std::move(bytes));
    writer.patch(size_at, size + 3);
    bytes = writer.take();
  }
  bytes.insert(bytes.end(), 5, std::byte{0xDD});
  return bytes;
}

TEST(StoreMessages, OfANewerNeighborAreReadWithoutWhatItAdded) {
  const auto table = full_table();
  for (const Bytes& good : examples()) {
    const Bytes longer = with_added_fields(good);
    EXPECT_NO_THROW(table.dispatch(longer, Sender::kNewer));
    EXPECT_THROW(table.dispatch(longer), Error) << "of a sender that is not newer";
  }
  ByteWriter unknown;
  unknown.put(std::uint16_t{999});
  EXPECT_NO_THROW(table.dispatch(unknown.bytes(), Sender::kNewer));
}

TEST(StoreMessages, ThatAnnounceANewerVersionMayBeLonger) {
  const ProtocolRange newer{kStoreProtocol.newest, kStoreProtocol.newest + 1, 0};
  const Register entry{newer, "job", make_member(3), 4, true, {"f(int)"}, std::chrono::seconds(3)};
  Welcome welcome{{make_member(3)}, {}};
  welcome.versions = newer;
  MessageTable<> table;
  Register registered;
  Welcome welcomed;
  table.on<Register>([&](Register message) { registered = std::move(message); });
  table.on<Welcome>([&](Welcome message) { welcomed = std::move(message); });
  table.dispatch(with_added_fields(encode_message(entry)));
  table.dispatch(with_added_fields(encode_message(welcome)));
  EXPECT_EQ(encode_message(registered), encode_message(entry));
  EXPECT_EQ(encode_message(welcomed), encode_message(welcome));
}

TEST(StoreMessages, RefuseKindsRanksAndTypesThatDoNotExist) {
  ByteWriter kind;
  kind.put(Refused::kType);
  kind.put(std::uint8_t{0});
  kind.put_string("");
  ByteWriter rank;
  rank.put(Missing::kType);
  rank.put(std::uint64_t{1});
  rank.put_bytes(bytes_of("\x01\x01\x01"));  // one run of one rank, which is -1
  ByteWriter type;
  type.put(std::uint16_t{999});
  const auto table = full_table();
  EXPECT_THROW(table.dispatch(kind.bytes()), Error);
  EXPECT_THROW(table.dispatch(rank.bytes()), Error);
  EXPECT_THROW(table.dispatch(type.bytes()), Error);
  EXPECT_THROW(table.dispatch({}), Error);
}

TEST(StoreMessages, DecodeEveryByteStringToAMessageOrAnError) {
  std::mt19937_64 random(11);
  SCOPED_TRACE("seed 11");
  const auto table = full_table();
  for (const Bytes& good : examples()) {
    EXPECT_NO_THROW(table.dispatch(good));
    for (std::size_t size = 0; size < good.size(); ++size) {
      EXPECT_THROW(table.dispatch(BytesView(good).first(size)), Error);
    }
    Bytes longer = good;
    longer.push_back(std::byte{0});
    EXPECT_THROW(table.dispatch(longer), Error);
    for (int round = 0; round < 2000; ++round) {
      Bytes bad = good;
      for (int change = 0; change < 2; ++change)
        bad[random() % bad.size()] = static_cast<std::byte>(random());
      try {
        table.dispatch(bad);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      }
    }
  }
}

}  // namespace
}  // namespace torchspan::rendezvous::messages_test
