// What recording costs: one line with the durations of a thousand operations each, and what they consist of.
#include <filesystem>
#include <memory>
#include <string>
#include <unistd.h>

#include <torchspan/detail/core/runtime.h>

#include "bench/harness.h"
#include "core/api/observation.h"

namespace torchspan::bench {
namespace {

constexpr int kOperations = 1000;

/// Repeats an operation whose duration alone could not be measured.
template <class F>
std::function<void()> thousand(F operation) {
  return [operation] {
    for (int i = 0; i < kOperations; ++i) operation(i);
  };
}

void measure() {
  const auto executor = make_executor();
  const auto idle = std::make_shared<Runtime>(*executor, "idle");
  const auto traced = std::make_shared<Runtime>(*executor, "traced");
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("torchspan-bench-trace-" + std::to_string(getpid())))
          .string();
  nlohmann::json metrics;
  {
    const Observation observation(traced, {.trace_folder = folder, .most_trace_spans = 100'000},
                                  identify(*executor, "traced", 0, 1));
    Bench bench(*executor);
    const auto record = [&](Runtime& runtime) {
      return thousand([&runtime, &executor](int i) {
        runtime.spans.record(SpanKind::kCall, "Encoder.forward", executor->now(),
                             SpanLink{.id = static_cast<std::uint64_t>(i), .peer = 1, .bytes = 64});
      });
    };
    const auto scope = [&](Runtime& runtime) {
      return thousand([&runtime](int i) {
        const SpanScope span(runtime.spans, SpanKind::kUser, "augment", static_cast<std::uint64_t>(i));
      });
    };
    const std::string clocks = "trace/two_clock_reads/1000";
    bench.add(clocks, 20, thousand([&](int) {
                static_cast<void>(executor->now());
                static_cast<void>(executor->now());
              }));
    bench.add("trace/record/1000", 20, record(*idle), {.limit = clocks});
    bench.add("trace/scope/1000", 20, scope(*idle), {.limit = clocks});
    bench.add("trace/record/1000/traced", 20, record(*traced), {.limit = clocks});
    bench.add("trace/scope/1000/traced", 20, scope(*traced), {.limit = clocks});
    bench.run(30);
    metrics = bench.metrics();
  }
  std::filesystem::remove_all(folder);
  print_section(metrics);
}

}  // namespace
}  // namespace torchspan::bench

int main() { torchspan::bench::measure(); }
