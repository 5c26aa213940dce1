#include "launch/supervisor/nodes.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <optional>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>

#include "launch/supervisor/variables.h"

namespace torchspan::launch {
namespace {

using rendezvous::Environment;

constexpr int kMostNodes = 65536;
constexpr std::uint16_t kDefaultPort = 29500;

int read_count(const std::string& text, const char* option, int least, int most) {
  int number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec == std::errc() && result.ptr == text.data() + text.size() && number >= least &&
      number <= most) {
    return number;
  }
  throw_invalid(fmt::format("{} {}: expected a number from {} to {}", option, text, least, most));
}

void read_rdzv(const std::string& text, NodePlace& place) {
  const std::size_t bracket = text.rfind(']'), colon = text.rfind(':');
  const bool has_port = colon != std::string::npos && (bracket == std::string::npos || colon > bracket) &&
                        (bracket != std::string::npos || text.find(':') == colon);
  place.rdzv_host = has_port ? text.substr(0, colon) : text;
  if (place.rdzv_host.starts_with('[') && place.rdzv_host.ends_with(']')) {
    place.rdzv_host = place.rdzv_host.substr(1, place.rdzv_host.size() - 2);
  }
  place.rdzv_port =
      has_port ? static_cast<std::uint16_t>(read_count(text.substr(colon + 1), "--rdzv port", 1, 65535))
               : kDefaultPort;
  if (place.rdzv_host.empty()) {
    throw_invalid(
        fmt::format("--rdzv {}: expected HOST or HOST:PORT, an address of the host with node rank 0", text));
  }
}

/// Throws if the workers could not read the job's secret.
void check_secret(const Environment& environment) {
  if (!value_of(environment, "TORCHSPAN_CERTIFICATE_FILE").empty()) return;
  const std::string named = value_of(environment, "TORCHSPAN_SECRET_FILE");
  try {
    net::Secret::from_file(named.empty() ? value_of(environment, "HOME") + "/.torchspan/secret" : named);
  } catch (const Error& error) {
    throw_invalid(
        fmt::format("--nnodes needs the job's secret, the same file on every host: {}", error.message()));
  }
}

/// The options, with those that are absent from a pod's variables; nullopt if the job has one pod or none.
std::optional<NodeOptions> complete_from_pod(NodeOptions options, const Environment& environment) {
  const std::string pods = value_of(environment, "PET_NNODES");
  if (!options.nodes.empty() || pods.empty() || pods == "1") return std::nullopt;
  options.nodes = pods;
  if (options.node_rank.empty()) options.node_rank = value_of(environment, "PET_NODE_RANK");
  const std::string host = value_of(environment, "PET_MASTER_ADDR");
  const std::string port = value_of(environment, "PET_MASTER_PORT");
  if (options.rdzv.empty() && !host.empty()) {
    const bool bare_ipv6 = std::count(host.begin(), host.end(), ':') > 1 && !host.starts_with('[');
    options.rdzv = (bare_ipv6 ? "[" + host + "]" : host) + (port.empty() ? "" : ":" + port);
  }
  return options;
}

}  // namespace

NodePlace read_node_options(const NodeOptions& options, const Environment& environment) {
  if (const auto completed = complete_from_pod(options, environment)) {
    try {
      return read_node_options(*completed, environment);
    } catch (const Error& error) {
      throw_invalid(fmt::format(
          "{}; the Kubernetes Trainer's PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT give "
          "what these options do not: --nnodes 1 starts a job of this pod alone",
          error.message()));
    }
  }
  NodePlace place;
  place.port_range = options.port_range;
  if (!options.nodes.empty()) place.count = read_count(options.nodes, "--nnodes", 1, kMostNodes);
  if (!place.several()) {
    for (const auto& [value, name] :
         {std::pair(options.node_rank, "--node-rank"), std::pair(options.rdzv, "--rdzv"),
          std::pair(options.rdzv_id, "--rdzv-id")}) {
      if (value.empty() || (value == "0" && name == std::string("--node-rank"))) continue;
      throw_invalid(fmt::format("{} {} is for a job on several hosts: add --nnodes", name, value));
    }
    return place;
  }
  if (options.node_rank.empty() || options.rdzv.empty()) {
    throw_invalid(
        "--nnodes needs --node-rank (0 on the first host, 1 on the next, …) and --rdzv HOST:PORT, an address "
        "of the first host that the others can reach");
  }
  place.node_rank = read_count(options.node_rank, "--node-rank", 0, place.count - 1);
  read_rdzv(options.rdzv, place);
  place.job_id =
      options.rdzv_id.empty() ? fmt::format("{}-{}", place.rdzv_host, place.rdzv_port) : options.rdzv_id;
  check_secret(environment);
  return place;
}

void add_node_variables(const NodePlace& place, const Environment& base, int workers, int local_rank,
                        Environment& worker) {
  if (!place.port_range.empty()) worker["TORCHSPAN_PORT_RANGE"] = place.port_range;
  if (!place.several()) return;
  const std::string rank = std::to_string(place.first_rank(workers) + local_rank);
  worker["RANK"] = worker["ROLE_RANK"] = rank;
  worker["WORLD_SIZE"] = worker["ROLE_WORLD_SIZE"] = std::to_string(place.count * workers);
  worker["GROUP_RANK"] = std::to_string(place.node_rank);
  worker["GROUP_WORLD_SIZE"] = std::to_string(place.count);
  worker["MASTER_ADDR"] = place.rdzv_host;
  worker["MASTER_PORT"] = std::to_string(place.rdzv_port);
  worker["TORCHSPAN_RUN_ID"] = worker["TORCHELASTIC_RUN_ID"] = place.job_id;
  if (const auto secret = base.find("TORCHSPAN_SECRET_FILE"); secret != base.end()) {
    worker["TORCHSPAN_SECRET_FILE"] = secret->second;
  } else {
    worker.erase("TORCHSPAN_SECRET_FILE");
  }
}

}  // namespace torchspan::launch
