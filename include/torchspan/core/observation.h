#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace torchspan {

/// What a worker writes and serves about its run (docs/observability.md). By default, nothing but a socket for
/// `torchspan stacks` and `torchspan top` under `torchspan run`.
struct ObservationOptions {
  std::string trace_folder = {};               ///< for the trace file of this worker; empty: none
  std::uint64_t most_trace_spans = 1'000'000;  ///< later ones are counted, not written
  /// Port on the loopback interface that serves metrics in Prometheus' text format; 0: a free one.
  std::optional<std::uint16_t> metrics_port = {};
  std::string tensorboard_folder = {};  ///< for event files with the logged scalars; empty: none
  std::string scalars_folder = {};      ///< for the same as JSON lines; empty: none
  std::string socket_folder = {};       ///< for the socket that serves this worker's state; empty: none

  /// Reads TORCHSPAN_TRACE, TORCHSPAN_TRACE_SPANS, TORCHSPAN_METRICS_PORT (the first rank's on its host),
  /// TORCHSPAN_TENSORBOARD, TORCHSPAN_SCALARS, LOCAL_RANK and TORCHSPAN_RUNTIME_DIR. Throws Error{kInvalid} that
  /// names the wrong variable.
  static ObservationOptions from(const std::map<std::string, std::string>& environment);
};

}  // namespace torchspan
