#include "core/api/text_server.h"
#include "tests/support/fuzz_seeds.h"

namespace {

torchspan::Bytes request_bytes(std::string_view text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    return std::vector<torchspan::Bytes>{request_bytes("GET /metrics?a=b HTTP/1.1\r\nHost: x\r\n\r\n")};
  });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto request = torchspan::parse_text_request({reinterpret_cast<const char*>(data), size});
  if (request && request->status == 200 && request->path.size() > size) __builtin_trap();
  return 0;
}
