#include <sstream>

#include <torchspan/core/error.h>

#include "launch/trace/profiler_file.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;

Bytes example_profile() {
  const std::string text =
      R"({"baseTimeNanoseconds": 1, "distributedInfo": {"rank": 1}, "traceEvents": [)"
      R"({"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7, "ts": 1.5, "dur": 2, "args": {"a": 1}},)"
      R"({"ph": "s", "id": 1, "pid": 7, "tid": 7, "ts": 1.5, "cat": "fwdbwd", "name": "fwdbwd"},)"
      R"({"ph": "f", "id": 1, "pid": 7, "tid": 7, "ts": 2, "cat": "fwdbwd", "name": "fwdbwd"},)"
      R"({"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": "CPU"}}]})";
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments,
                                         [] { return std::vector<Bytes>{example_profile()}; });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    std::istringstream text(std::string(reinterpret_cast<const char*>(data), size));
    const auto profile = torchspan::launch::decode_profile(text);
    if (!profile) return 0;
    for (const auto& event : profile->events) {
      if (event.row >= profile->rows.size() || event.name >= profile->names.size() ||
          event.category >= profile->categories.size() || event.end < event.begin) {
        __builtin_trap();
      }
    }
    for (const auto& arrow : profile->arrows) {
      if (arrow.from.row >= profile->rows.size() || arrow.to.row >= profile->rows.size()) __builtin_trap();
    }
  } catch (const Error&) {
  }
  return 0;
}
