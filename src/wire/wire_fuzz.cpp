#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/ones.h>

#include <torchspan/detail/wire/frame.h>
#include <torchspan/wire.h>

#include "tests/support/fuzz_seeds.h"
#include "wire/api/tensors.h"

namespace torchspan::wire {
namespace {

/// One of each kind of container, and an Error.
using Everything =
    std::tuple<std::map<std::string, std::vector<std::int32_t>>, std::vector<std::optional<std::string>>,
               std::variant<std::monostate, std::vector<bool>, c10::Device>, Duration, c10::Scalar, Error>;

/// The versions and features of a release that is newer than this one.
constexpr ProtocolRange kNewer{kWireProtocol.newest, kWireProtocol.newest + 1, 1u << 31};

void fuzz_frame(BytesView bytes) {
  const FrameView frame = decode_frame(bytes, kNewer);
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

/// What decodes must also encode, or throw Error.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    torchspan::wire::fuzz(std::as_bytes(std::span(data, size)));
  } catch (const torchspan::Error&) {
    return 0;
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using namespace torchspan;
    using namespace torchspan::wire;
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    std::vector<Bytes> seeds;
    Frame frame;
    frame.header.flags = kFlagHasDeadline;
    frame.blobs = {{"trace", Bytes(3)}, {"autograd", Bytes(20)}};
    frame.handles = {Handle{1, {0, 3}, {0, 4}, 5}};
    frame.value = Bytes(10);
    frame.tensor_metadata = Bytes(4);
    seeds.push_back(joined({bytes_of({0}), encode_frame(frame)}));
    frame.header.version = kNewer.newest;
    frame.header.features = kNewer.features;
    seeds.push_back(joined({bytes_of({0}), encode_frame(frame)}));
    const at::Tensor dense = at::ones({2, 3});
    for (const at::Tensor& tensor : {dense, dense.t(), dense.to_sparse(), dense.expand({4, 2, 3}),
                                     at::Tensor(), at::ones({0, 2}), dense.to(at::kHalf)}) {
      PackOptions options;
      if (tensor.defined() && !tensor.is_contiguous())
        options.place = [](c10::Device) { return c10::Device("cuda:1"); };
      const PackedTensors packed = pack(std::vector{tensor, dense}, options);
      Bytes seed = bytes_of({1, static_cast<int>(packed.segments.size())});
      for (const Segment& segment : packed.segments) {
        seed.push_back(static_cast<std::byte>(segment.size - 1));
        seed.push_back(std::byte{0});
      }
      seeds.push_back(joined({seed, packed.metadata}));
    }
    const auto value = [&](int kind, const auto& of) {
      seeds.push_back(joined({bytes_of({kind}), to_payload(of).value}));
    };
    c10::List<std::int64_t> list({1, 2, 3});
    c10::Dict<std::string, double> dict;
    dict.insert("key", 1.5);
    for (const c10::IValue& one : {c10::IValue(), c10::IValue(true), c10::IValue(1.5), c10::IValue("text"),
                                   c10::IValue(list), c10::IValue(dict), c10::IValue(dense),
                                   c10::IValue(std::make_tuple(std::int64_t{1}, std::string("b")))}) {
      value(2, one);
    }
    value(3, Everything{{{"key", {1, 2}}},
                        {"a", std::nullopt},
                        std::vector<bool>{true, false},
                        Duration(5),
                        c10::Scalar(1.5),
                        Error(ErrorKind::kInvalid, "text")});
    value(3, Everything{{},
                        {},
                        c10::Device("cuda:0"),
                        Duration(0),
                        c10::Scalar(1),
                        Error(ErrorKind::kTimedOut, "").with_worker("w")});
    return seeds;
  });
}
