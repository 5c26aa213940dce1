#include <string_view>

#include "launch/supervisor/worker_error.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using torchspan::Bytes;

Bytes bytes_of_text(std::string_view text) {
  Bytes bytes;
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    return std::vector<Bytes>{
        bytes_of_text(R"({"message": "text"})"),
        bytes_of_text(
            R"({"message": {"message": "E: x", "extraInfo": {"py_callstack": "at", "timestamp": "17"}}})")};
  });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto error = torchspan::launch::decode_worker_error({reinterpret_cast<const char*>(data), size});
  if (error && torchspan::launch::shorten_message(error->message).size() > 2100 + 10 * 5) __builtin_trap();
  return 0;
}
