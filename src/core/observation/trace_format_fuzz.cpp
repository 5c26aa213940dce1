#include "core/api/trace_format.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;

Bytes example() {
  TraceEncoder encoder;
  encoder.identity({.name = "worker0", .host = "h", .clock = "c", .run = "r"});
  encoder.names(0, {"a", "b"});
  encoder.threads(0, {"main"});
  encoder.spans({StoredSpan{.begin = 1, .end = 2}});
  encoder.scalars({{"loss", 1, 0.5, {}}});
  encoder.clock_samples({{}});
  encoder.counters({1, {{"calls", 2}}});
  encoder.lost(3);
  encoder.end();
  return encoder.take();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] { return std::vector<Bytes>{example()}; });
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const TraceContents trace = decode_trace({reinterpret_cast<const std::byte*>(data), size});
    for (const StoredSpan& span : trace.spans) {
      if (span.name >= trace.names.size() || span.thread >= trace.threads.size()) __builtin_trap();
    }
  } catch (const Error&) {
  }
  return 0;
}
