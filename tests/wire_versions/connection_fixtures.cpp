#include <algorithm>
#include <cstring>

#include "collective/channels/messages.h"
#include "net/framing.h"
#include "net/handshake.h"
#include "net/tls/hello.h"
#include "net/tls/pieces.h"
#include "net/ucx/greeting.h"
#include "tests/wire_versions/fixtures.h"

namespace torchspan::wire_versions::connection_bytes {
namespace {

using namespace net;  // NOLINT(google-build-using-namespace)

HandshakeOptions options_of(Role role) {
  HandshakeOptions options;
  options.secret = Secret::from_bytes(Bytes(32, std::byte{'s'}));
  options.peer = "the peer";
  options.nonce.fill(role == Role::kDialer ? std::byte{0xD1} : std::byte{0x71});
  options.lowest = options.highest = kFilesVersion;
  options.features = kSharesMemory;
  return options;
}

/// The hello and the proof that a side sends when it receives these of the other side.
Parts answers(Role role, const Parts& theirs) {
  Handshake side(role, options_of(role));
  Parts mine{side.take_output()};
  for (const Bytes& bytes : theirs) {
    side.receive(bytes);
    if (Bytes next = side.take_output(); !next.empty()) mine.push_back(std::move(next));
  }
  return mine;
}

Parts dialer_hello() { return {Handshake(Role::kDialer, options_of(Role::kDialer)).take_output()}; }

/// Messages of both sides: the hellos, then the proofs of the dialer and of the listener.
Parts handshake() {
  const Parts listener = answers(Role::kListener, dialer_hello());
  const Parts dialer = answers(Role::kDialer, {listener.at(0)});
  const Parts listener_proof = answers(Role::kListener, dialer);
  return {dialer.at(0), listener.at(0), dialer.at(1), listener_proof.at(1)};
}

/// Each side, from the recorded messages of the other one, sends its own again.
Parts repeat_handshake(const Parts& parts) {
  const Parts dialer = answers(Role::kDialer, {parts.at(1), parts.at(3)});
  const Parts listener = answers(Role::kListener, {parts.at(0), parts.at(2)});
  return {dialer.at(0), listener.at(0), dialer.at(1), listener.at(1)};
}

constexpr std::uint64_t kLimit = 1 << 20;

Bytes stream_of(BytesView header, const std::vector<Bytes>& segments) {
  std::vector<Segment> views;
  for (const Bytes& segment : segments) views.push_back(Segment{segment.data(), segment.size(), nullptr});
  const FramePrefix prefix(header, views);
  Bytes all(prefix.bytes().begin(), prefix.bytes().end());
  all.insert(all.end(), header.begin(), header.end());
  for (const Bytes& segment : segments) all.insert(all.end(), segment.begin(), segment.end());
  return all;
}

Parts repeat_stream(const Parts& parts) {
  FrameParser parser({kLimit, kLimit, 8}, allocate_buffer);
  std::vector<Message> finished;
  parser.feed(parts.at(0), finished);
  Parts again;
  for (const Message& message : finished) {
    std::vector<Bytes> segments;
    for (const Buffer& segment : message.segments) {
      const auto* data = static_cast<const std::byte*>(segment.data);
      segments.emplace_back(data, data + segment.size);
    }
    again.push_back(stream_of(message.header, segments));
  }
  if (parser.goodbye()) again.push_back(parts.at(0));
  return again;
}

template <std::size_t kSize>
Bytes copy_of(const std::array<std::byte, kSize>& bytes) {
  return Bytes(bytes.begin(), bytes.end());
}

void add_group_notes(Fixtures& all) {
  using namespace collective::channels;  // NOLINT(google-build-using-namespace)
  const auto rewrite = [](const Parts& parts) { return Parts{encode(decode(parts.at(0)))}; };
  const auto add = [&](const std::string& name, const GroupMessage& note) {
    all.push_back({"group/" + name, {encode(note)}, rewrite});
  };
  add("Hello", Hello{0x1122334455667788, 0x21324354});
  add("Part", Part{0x1122334455667788, 0x21324354, 0x3142536475869708});
  add("Abort", Abort{ErrorKind::kTimedOut, 0x1122334455667788, "late"});
  add("End", End{"bye"});
  add("Offer", Offer{0x1122334455667788, 0x21324354, "Float [3]"});
  add("Accept", Accept{0x1122334455667788});
  add("Data", Data{0x2122334455667788});
  add("Done", Done{0x3122334455667788});
}

}  // namespace

Fixtures fixtures() {
  Fixtures all;
  all.push_back({"handshake", handshake(), repeat_handshake});
  const Bytes header(3, std::byte{0x48});
  all.push_back({"stream/message",
                 {stream_of(header, {Bytes(2, std::byte{0x51}), Bytes(5, std::byte{0x52})})},
                 repeat_stream});
  all.push_back({"stream/goodbye", {copy_of(goodbye_frame())}, repeat_stream});
  all.push_back({"stream/heartbeat", {copy_of(heartbeat_frame())}, [](const Parts& parts) {
                   FrameParser parser({kLimit, kLimit, 8}, allocate_buffer, FrameDialect::kLanes);
                   std::vector<Message> finished;
                   parser.feed(parts.at(0), finished);
                   return finished.empty() && !parser.goodbye() && !parser.mid_frame() ? parts : Parts();
                 }});
  all.push_back(
      {"tls/piece", {copy_of(piece_prefix(0x1122334455667788, 0x21324354))}, [](const Parts& parts) {
         ByteReader reader(parts.at(0));
         const auto message = reader.get<std::uint64_t>();
         return Parts{copy_of(piece_prefix(message, reader.get<std::uint32_t>()))};
       }});
  LaneHello hello{kFilesVersion, kFilesVersion, 3, 2, kSendsUnencrypted, {}};
  hello.token.fill(std::byte{0x7A});
  all.push_back({"tls/hello", {encode(hello)}, [](const Parts& parts) {
                   return Parts{encode(decode_lane_hello(parts.at(0), "the peer"))};
                 }});
  const auto rewrite_note = [](const Parts& parts) {
    return Parts{
        std::visit([](const auto& note) { return encode(note); }, decode_ucx_note(parts.at(0), "the peer"))};
  };
  all.push_back({"ucx/greeting",
                 {encode(UcxGreeting{1, 16, 0x1122334455667788, Bytes(4, std::byte{9})})},
                 rewrite_note});
  all.push_back({"ucx/farewell", {encode(UcxFarewell{})}, rewrite_note});
  add_group_notes(all);
  return all;
}

}  // namespace torchspan::wire_versions::connection_bytes
