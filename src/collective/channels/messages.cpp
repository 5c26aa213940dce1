#include "collective/channels/messages.h"

#include "core/api/throw_invalid.h"

namespace torchspan::collective::channels {
namespace {

enum class NoteType : std::uint8_t { kHello = 1, kPart, kAbort, kEnd, kOffer, kAccept, kData, kDone };

constexpr std::size_t kMostText = 32 << 10;

void write(ByteWriter& writer, const Hello& hello) {
  writer.put(NoteType::kHello);
  writer.put(hello.nonce);
  writer.put(hello.rank);
}
void write(ByteWriter& writer, const Part& part) {
  writer.put(NoteType::kPart);
  writer.put(part.operation);
  writer.put(part.part);
  writer.put(part.calls);
}
void write(ByteWriter& writer, const Abort& abort) {
  writer.put(NoteType::kAbort);
  writer.put(abort.kind);
  writer.put(abort.from_call);
  writer.put_string(std::string_view(abort.text).substr(0, kMostText));
}
void write(ByteWriter& writer, const End& end) {
  writer.put(NoteType::kEnd);
  writer.put_string(std::string_view(end.text).substr(0, kMostText));
}
void write(ByteWriter& writer, const Offer& offer) {
  writer.put(NoteType::kOffer);
  writer.put(offer.number);
  writer.put(offer.tag);
  writer.put_string(std::string_view(offer.text).substr(0, kMostText));
}
void write_number(ByteWriter& writer, NoteType type, std::uint64_t number) {
  writer.put(type);
  writer.put(number);
}
void write(ByteWriter& writer, const Accept& accept) {
  write_number(writer, NoteType::kAccept, accept.number);
}
void write(ByteWriter& writer, const Data& data) { write_number(writer, NoteType::kData, data.number); }
void write(ByteWriter& writer, const Done& done) { write_number(writer, NoteType::kDone, done.number); }

ErrorKind read_kind(ByteReader& reader) {
  const auto kind = reader.get<std::uint8_t>();
  if (kind < static_cast<std::uint8_t>(ErrorKind::kInvalid) ||
      kind > static_cast<std::uint8_t>(ErrorKind::kUnsupported)) {
    throw_invalid("{} is not the number of an error kind", kind);
  }
  return static_cast<ErrorKind>(kind);
}

GroupMessage read(ByteReader& reader) {
  const auto type = reader.get<std::uint8_t>();
  switch (static_cast<NoteType>(type)) {
    case NoteType::kHello: {
      Hello hello;
      hello.nonce = reader.get<std::uint64_t>();
      hello.rank = reader.get<std::uint32_t>();
      return hello;
    }
    case NoteType::kPart: {
      Part part;
      part.operation = reader.get<std::uint64_t>();
      part.part = reader.get<std::uint32_t>();
      part.calls = reader.get<std::uint64_t>();
      return part;
    }
    case NoteType::kAbort: {
      Abort abort;
      abort.kind = read_kind(reader);
      abort.from_call = reader.get<std::uint64_t>();
      abort.text = reader.get_string();
      return abort;
    }
    case NoteType::kEnd:
      return End{reader.get_string()};
    case NoteType::kOffer: {
      Offer offer;
      offer.number = reader.get<std::uint64_t>();
      offer.tag = reader.get<std::uint32_t>();
      offer.text = reader.get_string();
      return offer;
    }
    case NoteType::kAccept:
      return Accept{reader.get<std::uint64_t>()};
    case NoteType::kData:
      return Data{reader.get<std::uint64_t>()};
    case NoteType::kDone:
      return Done{reader.get<std::uint64_t>()};
  }
  throw_invalid("{} is not the type of a message between ranks", type);
}

}  // namespace

Bytes encode(const GroupMessage& note) {
  ByteWriter writer;
  std::visit([&](const auto& message) { write(writer, message); }, note);
  return writer.take();
}

GroupMessage decode(BytesView header) {
  ByteReader reader(header);
  GroupMessage note = read(reader);
  reader.expect_end();
  return note;
}

}  // namespace torchspan::collective::channels
