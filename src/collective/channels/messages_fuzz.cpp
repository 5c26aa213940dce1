#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "collective/channels/messages.h"
#include "tests/support/fuzz_seeds.h"

/// Every header either is rejected or decodes to a message with the same encoding.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan;
  using namespace torchspan::collective::channels;
  const BytesView header = std::as_bytes(std::span(data, size));
  if (size > std::size_t{32} << 10) return 0;
  try {
    const Bytes again = encode(decode(header));
    if (!std::equal(again.begin(), again.end(), header.begin(), header.end())) std::abort();
  } catch (const Error&) {
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using namespace torchspan;
    using namespace torchspan::collective::channels;
    return std::vector<Bytes>{encode(Hello{1, 2}),
                              encode(Part{3, 4, 5}),
                              encode(Abort{ErrorKind::kTimedOut, 7, "late"}),
                              encode(End{"bye"}),
                              encode(Offer{6, 7, "Float [3]"}),
                              encode(Accept{8}),
                              encode(Data{9}),
                              encode(Done{10})};
  });
}
