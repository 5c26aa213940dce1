// Parts of tensors in host memory, and messages that need them, as a peer sends them: whatever it sends, a message gets
// whole tensors, and the table holds no more than was sent.
#include <cstdlib>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>

#include "rpc/tensor_parts/incoming_parts.h"
#include "tests/support/fuzz_seeds.h"

namespace torchspan::rpc {
namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Four bytes begin a part: its tensor, the tensor's bytes, the part's bytes, and how many segments it has. What
/// remains after a zero is a message's blob.
void fuzz_parts(BytesView input) {
  device::CopyStreams copies;
  const std::unique_ptr<Executor> executor = make_executor();
  ReceivedMemory received(copies, *executor);
  IncomingParts table(copies, received);
  try {
    while (input.size() >= 4 && input[0] != std::byte{0}) {
      const auto number = [&](std::size_t at) { return std::to_integer<std::size_t>(input[at]); };
      std::vector<Buffer> segments;
      for (std::size_t i = 0; i < number(3) % 3; ++i) segments.push_back(allocate_buffer(number(2)));
      table.receive(nullptr, {number(0), number(1)}, segments);
      input = input.subspan(4);
    }
    const std::size_t waiting = table.waiting();
    std::vector<Buffer> segments{allocate_buffer(300)};
    std::vector<wire::DeviceSegment> on_device{{0, c10::kCPU}};
    table.insert(nullptr, input.empty() ? input : input.subspan(1), {segments, on_device});
    require(segments.size() - 1 == waiting - table.waiting());
    require(segments.at(on_device.front().index).size == 300);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalid || error.kind() == ErrorKind::kOverloaded);
  }
  table.closed(nullptr);
  require(table.waiting() == 0);
}

std::vector<Bytes> parts_seeds() {
  const auto with_parts = [](std::vector<int> parts, SplitPlaces places) {
    Bytes bytes;
    for (const int one : parts) bytes.push_back(static_cast<std::byte>(one));
    const Bytes blob = wire::to_payload(places).value;
    bytes.insert(bytes.end(), blob.begin(), blob.end());
    return bytes;
  };
  return {with_parts({0}, {}), with_parts({1, 5, 5, 1, 0}, {{{1, 1}}}),
          with_parts({1, 5, 2, 1, 2, 9, 9, 1, 1, 5, 3, 1, 0}, {{{0, 2}, {2, 1}}}),
          with_parts({1, 5, 2, 1, 1, 5, 2, 0, 0}, {})};
}

}  // namespace
}  // namespace torchspan::rpc

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, torchspan::rpc::parts_seeds);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  torchspan::rpc::fuzz_parts({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
