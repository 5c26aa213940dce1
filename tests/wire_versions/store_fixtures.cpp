#include "rendezvous/messages/messages.h"
#include "tests/wire_versions/fixtures.h"

namespace torchspan::wire_versions::store_bytes {
namespace {

using namespace rendezvous;  // NOLINT(google-build-using-namespace)

template <class Message>
Parts rewrite(const Parts& parts) {
  ByteReader reader(parts.at(0));
  if (reader.get<std::uint16_t>() != Message::kType) throw Error(ErrorKind::kInvalid, "another type");
  const Message message = decode_message<Message>(reader);
  reader.expect_end();
  return {encode_message(message)};
}

template <class Message>
void add(Fixtures& all, const std::string& name, const Message& message) {
  all.push_back({std::to_string(Message::kType) + "/" + name, {encode_message(message)}, rewrite<Message>});
}

Member member(int rank) {
  Member member;
  member.name = "worker" + std::to_string(rank);
  member.rank = rank;
  member.address = "tls:node" + std::to_string(rank) + ":29501";
  member.instance = 0x1122334455667788;
  member.host = "node";
  member.host_id = "boot";
  member.pid = 0x2132435465;
  member.start_ticks = 0x3142536475;
  member.uid = 0x4152637485;
  member.functions_digest = 0x5162738495A6B7C8;
  member.incarnation = 0x61728394;
  member.wire = {kFilesVersion, kFilesVersion, 0};
  return member;
}

}  // namespace

Fixtures fixtures() {
  constexpr ProtocolRange kVersions{kFilesVersion, kFilesVersion, 0};
  const Bytes some(3, std::byte{0xAB});
  Fixtures all;
  add(all, "Register",
      Register{kVersions, "job", member(kAnyRank), 4, true, {"f (int64) -> int64"}, Duration(0x718293A4B5)});
  add(all, "Welcome",
      Welcome{{member(0), member(1)}, {{{1}, true, " died: killed"}, {{0}, false, ""}}, kVersions});
  add(all, "Refused", Refused{ErrorKind::kDenied, "no", true});
  add(all, "Contribute", Contribute{9, "tag", {0, 2}, 5, Duration(0x8192A3B4C5), some, {7, 8}, {11, 12}});
  add(all, "Gathered", Gathered{9, {{2, some}, {1, {}}}});
  add(all, "RoundFailed", RoundFailed{9, ErrorKind::kTimedOut, "late"});
  add(all, "Leave", Leave{});
  add(all, "Farewell", Farewell{});
  add(all, "Ping", Ping{Duration(0x91A2B3C4D5), TimePoint(Duration(7))});
  add(all, "Pong", Pong{TimePoint(Duration(7)), TimePoint(Duration(8)), TimePoint(Duration(9))});
  add(all, "DeclaredDead", DeclaredDead{"silent"});
  add(all, "AskMissing", AskMissing{9});
  add(all, "Missing", Missing{9, {0, 5}});
  add(all, "GiveUp", GiveUp{"left because of something"});
  add(all, "Changes",
      Changes{{Departed{{3, 4}, true, " died: killed"}, Departed{{5}}, Arrived{{member(5)}}}});
  add(all, "Summed", Summed{9, {{7, 8}, {{1, some}}, 2}});
  return all;
}

}  // namespace torchspan::wire_versions::store_bytes
