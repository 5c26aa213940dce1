#pragma once
// For tests: traces of workers that never ran.
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/api/trace_format.h"

namespace torchspan::launch {

/// Builds the trace of one worker.
class ExampleTrace {
 public:
  explicit ExampleTrace(int rank, int world_size = 2) {
    trace_.identity = {.name = "worker" + std::to_string(rank),
                       .rank = rank,
                       .world_size = world_size,
                       .host = "node",
                       .clock = "clock",
                       .run = "run",
                       .process = 100 + rank,
                       .unix_began = 1'700'000'000'000'000'000};
    trace_.threads = {"main", "pool"};
    trace_.complete = true;
  }

  ExampleTrace& clock(std::string host, std::string clock) {
    trace_.identity.host = std::move(host);
    trace_.identity.clock = std::move(clock);
    return *this;
  }
  /// Times are in nanoseconds.
  ExampleTrace& span(SpanKind kind, const std::string& name, std::int64_t begin, std::int64_t end,
                     SpanLink link = {}, bool nested = false) {
    std::uint32_t number = 0;
    while (number < trace_.names.size() && trace_.names[number] != name) ++number;
    if (number == trace_.names.size()) trace_.names.push_back(name);
    trace_.spans.push_back({begin, end, link, number, 0, kind, nested});
    return *this;
  }
  TraceContents& contents() { return trace_; }

 private:
  TraceContents trace_;
};

/// Random spans, some of which claim to nest and do not.
inline TraceContents random_trace(int rank, std::mt19937_64& random, int spans) {
  ExampleTrace trace(rank);
  const auto draw = [&](std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(0, most)(random);
  };
  for (int i = 0; i < spans; ++i) {
    const std::int64_t begin = draw(100000);
    trace.span(static_cast<SpanKind>(draw(9)), "name " + std::to_string(draw(20)), begin, begin + draw(5000),
               {.id = static_cast<std::uint64_t>(draw(50)), .peer = static_cast<std::int32_t>(draw(2)) - 1},
               draw(1) == 1);
    trace.contents().spans.back().thread = static_cast<std::uint32_t>(draw(1));
  }
  return trace.contents();
}

}  // namespace torchspan::launch
