#include "launch/supervisor/host_link.h"
#include "tests/support/fuzz_seeds.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::launch::HostMessage;
    return std::vector<torchspan::Bytes>{
        encode_host_message(HostMessage{.id = 7}),
        encode_host_message(HostMessage{.version = 2, .kind = HostMessage::Kind::kAnswer, .id = 8})};
  });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace torchspan::launch;
  const auto message = decode_host_message({reinterpret_cast<const std::byte*>(data), size});
  if (message && !decode_host_message(encode_host_message(*message))) __builtin_trap();
  return 0;
}
