#include "net/ucx/greeting.h"

#include <fmt/format.h>
#include <tuple>

namespace torchspan::net {
namespace {

constexpr std::uint32_t kUcxMagic = 0x58435554;
constexpr std::uint8_t kVersion = 1;
constexpr std::uint8_t kGreeting = 1;
constexpr std::uint8_t kFarewell = 2;

ByteWriter begin(std::uint8_t type) {
  ByteWriter writer;
  writer.put(kUcxMagic);
  writer.put(kVersion);
  writer.put(type);
  writer.put(std::uint16_t{0});
  return writer;
}

UcxGreeting read_greeting(ByteReader& reader) {
  UcxGreeting greeting;
  greeting.major = reader.get<std::uint32_t>();
  greeting.minor = reader.get<std::uint32_t>();
  greeting.channel = reader.get<std::uint64_t>();
  const BytesView address = reader.get_bytes(reader.get_count(1));
  greeting.address.assign(address.begin(), address.end());
  return greeting;
}

}  // namespace

Bytes encode(const UcxGreeting& greeting) {
  ByteWriter writer = begin(kGreeting);
  writer.put(greeting.major);
  writer.put(greeting.minor);
  writer.put(greeting.channel);
  writer.put(static_cast<std::uint32_t>(greeting.address.size()));
  writer.put_bytes(greeting.address);
  return writer.take();
}

Bytes encode(const UcxFarewell& /*farewell*/) { return begin(kFarewell).take(); }

UcxNote decode_ucx_note(BytesView bytes, const std::string& peer) {
  try {
    ByteReader reader(bytes);
    const auto magic = reader.get<std::uint32_t>();
    const auto version = reader.get<std::uint8_t>();
    const auto type = reader.get<std::uint8_t>();
    const auto zero = reader.get<std::uint16_t>();
    const bool known = type == kGreeting || type == kFarewell;
    if (magic != kUcxMagic || version != kVersion || !known || zero != 0) {
      throw_invalid("the bytes are not one of its notes");
    }
    UcxNote note = UcxFarewell{};
    if (type == kGreeting) note = read_greeting(reader);
    reader.expect_end();
    return note;
  } catch (const Error& error) {
    throw Error(error.kind(),
                fmt::format("'{}' does not speak the protocol of a UCX transport: {}; is it one?", peer,
                            error.message()));
  }
}

void check_ucx_versions(const UcxGreeting& theirs, const UcxGreeting& ours, const std::string& peer) {
  constexpr std::tuple<std::uint32_t, std::uint32_t> kFirstCompatible{1, 16};
  const auto a = std::tie(theirs.major, theirs.minor), b = std::tie(ours.major, ours.minor);
  if (a == b || (a >= kFirstCompatible && b >= kFirstCompatible && theirs.major == ours.major)) return;
  throw Error(ErrorKind::kUnsupported,
              fmt::format("'{}' runs UCX {}.{}, this side {}.{}, which are not compatible: install "
                          "the same UCX on all hosts",
                          peer, theirs.major, theirs.minor, ours.major, ours.minor));
}

}  // namespace torchspan::net
