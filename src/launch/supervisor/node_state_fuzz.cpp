#include "launch/supervisor/node_rounds.h"
#include "tests/support/fuzz_seeds.h"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    torchspan::launch::NodeState state, failed;
    state.options = "-n 4";
    failed.failure = torchspan::launch::NodeState::Failure{{}, "worker1 (rank 1, pid 17) exited with code 1"};
    return std::vector<torchspan::Bytes>{encode_node_state(state), encode_node_state(failed)};
  });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using torchspan::launch::decode_node_state;
  const auto state = decode_node_state({reinterpret_cast<const std::byte*>(data), size});
  if (state && !decode_node_state(encode_node_state(*state))) __builtin_trap();
  return 0;
}
