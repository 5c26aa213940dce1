#include <algorithm>

#include <torchspan/wire.h>

namespace torchspan {
namespace {
/// A longer chain of calls is cut at the end farthest from the failure.
constexpr std::uint32_t kMaxFrames = 256;
}  // namespace

void Wire<Error>::encode(wire::Encoder& encoder, const Error& error) {
  wire::encode(encoder, error.kind());
  wire::encode(encoder, error.message());
  wire::encode(encoder, error.worker());
  wire::encode(encoder, error.call());
  wire::encode(encoder, error.elapsed());
  const auto count = std::min<std::size_t>(error.frames().size(), kMaxFrames);
  wire::encode_count(encoder, count);
  for (std::size_t i = 0; i < count; ++i) wire::encode(encoder, error.frames()[i]);
}

Error Wire<Error>::decode(wire::Decoder& decoder) {
  const auto kind = wire::decode<ErrorKind>(decoder);
  Error error(kind, wire::decode<std::string>(decoder));
  error.with_worker(wire::decode<std::string>(decoder));
  error.with_call(wire::decode<std::string>(decoder));
  error.with_elapsed(wire::decode<Duration>(decoder));
  const std::size_t count = decoder.bytes().get_count(1);
  if (count > kMaxFrames) throw_invalid("a received error has more than 256 remote frames");
  for (std::size_t i = 0; i < count; ++i) error.with_frame(wire::decode<RemoteFrame>(decoder));
  return error;
}

}  // namespace torchspan
