#include <charconv>
#include <fmt/format.h>

#include <torchspan/core/error.h>
#include <torchspan/core/observation.h>

namespace torchspan {
namespace {

std::string variable(const std::map<std::string, std::string>& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

/// A number from 0 to `most`; nullopt if the variable is empty.
std::optional<std::uint64_t> number(const std::map<std::string, std::string>& environment,
                                    const std::string& name, std::uint64_t most) {
  const std::string text = variable(environment, name);
  if (text.empty()) return std::nullopt;
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc() || result.ptr != text.data() + text.size() || value > most) {
    throw_invalid(fmt::format("{} is '{}'; expected a number from 0 to {}", name, text, most));
  }
  return value;
}

}  // namespace

ObservationOptions ObservationOptions::from(const std::map<std::string, std::string>& environment) {
  ObservationOptions options;
  options.trace_folder = variable(environment, "TORCHSPAN_TRACE");
  options.tensorboard_folder = variable(environment, "TORCHSPAN_TENSORBOARD");
  options.scalars_folder = variable(environment, "TORCHSPAN_SCALARS");
  options.socket_folder = variable(environment, "TORCHSPAN_RUNTIME_DIR");
  if (const auto most = number(environment, "TORCHSPAN_TRACE_SPANS", 1'000'000'000)) {
    options.most_trace_spans = *most;
  }
  constexpr std::uint64_t kLastPort = 65535;
  const auto port = number(environment, "TORCHSPAN_METRICS_PORT", kLastPort);
  if (!port) return options;
  const std::uint64_t local_rank = number(environment, "LOCAL_RANK", kLastPort).value_or(0);
  if (*port + local_rank > kLastPort) {
    throw_invalid(
        fmt::format("TORCHSPAN_METRICS_PORT is {}, and the worker with LOCAL_RANK {} adds its rank: "
                    "choose a port that leaves room below {}",
                    *port, local_rank, kLastPort));
  }
  options.metrics_port = static_cast<std::uint16_t>(*port == 0 ? 0 : *port + local_rank);
  return options;
}

}  // namespace torchspan
