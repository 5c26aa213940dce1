#pragma once
// What a program adds to the trace of its run: docs/observability.md.
#include <cstdint>
#include <optional>
#include <string_view>

#include <torchspan/detail/core/runtime.h>

namespace torchspan {

/// Something that has a runtime: a Session or a Worker.
template <class Source>
concept RuntimeSource = requires(Source& source) {
  { source.runtime() } -> std::convertible_to<Runtime&>;
};

/// Shows a part of the program in the trace, from construction to destruction: `ts::Span span(session,
/// "augment")`. Costs about 0.2 µs. The session's runtime must outlive it.
class Span {
 public:
  template <RuntimeSource Source>
  Span(Source& source, std::string_view name) : scope_(source.runtime().spans, SpanKind::kUser, name) {}
  /// A span named "step" delimits a training step in reports; `number` is shown.
  template <RuntimeSource Source>
  Span(Source& source, std::string_view name, std::uint64_t number)
      : scope_(source.runtime().spans, SpanKind::kUser, name, number) {}

 private:
  SpanScope scope_;
};

/// Adds a point to the curve `tag` in the trace, TensorBoard and JSON lines, whichever the run writes: no
/// file is written on this thread. Without `step`, the values of a tag are numbered from 0.
template <RuntimeSource Source>
void log_scalar(Source& source, std::string_view tag, double value,
                std::optional<std::int64_t> step = std::nullopt) {
  Runtime& runtime = source.runtime();
  runtime.scalars.add(tag, value, step, runtime.executor.now());
}

}  // namespace torchspan
