#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/ones.h>

#include <torchspan/wire/frame.h>
#include <torchspan/wire/tensors.h>
#include <torchspan/wire/types.h>

namespace torchspan::wire {
namespace {

/// One of each kind of container, and an Error.
using Everything =
    std::tuple<std::map<std::string, std::vector<std::int32_t>>, std::vector<std::optional<std::string>>,
               std::variant<std::monostate, std::vector<bool>, c10::Device>, Duration, c10::Scalar, Error>;

void fuzz_frame(BytesView bytes) {
  const FrameView frame = decode_frame(bytes);
  if (const NamedBlobView* blob = frame.blob("trace")) static_cast<void>(blob->bytes.size());
}

/// The input begins with a number of segments and their sizes; tensors are rebuilt from the rest.
void fuzz_tensors(BytesView bytes) {
  ByteReader reader(bytes);
  std::vector<Buffer> segments(reader.get<std::uint8_t>() % 8);
  for (Buffer& segment : segments) {
    segment = allocate_buffer(std::size_t{1} + reader.get<std::uint8_t>());
    std::memset(segment.data, reader.get<std::uint8_t>(), segment.size);
  }
  const std::vector<at::Tensor> tensors = unpack(reader.get_bytes(reader.left()), segments);
  pack(tensors);
}

template <class T>
void fuzz_value(BytesView bytes) {
  Payload payload{Bytes(bytes.begin(), bytes.end()), {at::ones({2}), at::Tensor()}, {}};
  const T value = from_payload<T>(payload);
  to_payload(value);
}

void fuzz(BytesView input) {
  ByteReader reader(input);
  const auto target = reader.get<std::uint8_t>();
  const BytesView rest = reader.get_bytes(reader.left());
  switch (target % 4) {
    case 0:
      return fuzz_frame(rest);
    case 1:
      return fuzz_tensors(rest);
    case 2:
      return fuzz_value<c10::IValue>(rest);
    default:
      return fuzz_value<Everything>(rest);
  }
}

}  // namespace
}  // namespace torchspan::wire

/// What decodes must be fit to be encoded again; what does not must say so by Error.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    torchspan::wire::fuzz(std::as_bytes(std::span(data, size)));
  } catch (const torchspan::Error&) {
    return 0;
  }
  return 0;
}
