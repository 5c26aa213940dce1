#include "launch/commands/schedule_costs.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::launch {
namespace {

using schedule::Costs;
using schedule::MemoryUnit;

/// Suffixes of amounts of memory, the largest first.
struct ByteUnit {
  const char* name;
  double bytes;
  bool binary;  ///< used in output
};
constexpr std::array<ByteUnit, 9> kByteUnits = {{{"TiB", 1024.0 * 1024 * 1024 * 1024, true},
                                                 {"TB", 1e12, false},
                                                 {"GiB", 1024.0 * 1024 * 1024, true},
                                                 {"GB", 1e9, false},
                                                 {"MiB", 1024.0 * 1024, true},
                                                 {"MB", 1e6, false},
                                                 {"KiB", 1024, true},
                                                 {"kB", 1e3, false},
                                                 {"B", 1, false}}};

constexpr double kMostMilliseconds = 1e6;
constexpr double kMostMemory = 1e12;

Duration from_milliseconds(const std::string& what, double milliseconds) {
  if (!(milliseconds >= 0 && milliseconds <= kMostMilliseconds)) {
    throw_invalid(
        fmt::format("{} {}: from 0 to {} milliseconds are possible", what, milliseconds, kMostMilliseconds));
  }
  return Duration(std::llround(milliseconds * 1e6));
}

/// One stage's entry of a costs file.
class Entry {
 public:
  Entry(const nlohmann::json& json, std::size_t number) : json_(json), number_(number) {
    if (!json.is_object()) throw_invalid(fmt::format("--costs-file: stages[{}] is not an object", number));
    for (const auto& [key, value] : json.items()) check_key(key);
  }

  Costs read() const {
    Costs costs;
    costs.forward = time("forward");
    if (json_.contains("backward")) {
      for (const char* half : {"input_gradient", "weight_gradient"}) {
        if (json_.contains(half)) {
          throw_invalid(
              fmt::format("--costs-file: stages[{}] has backward and {}; remove one", number_, half));
        }
      }
      const Duration backward = time("backward");
      costs.input_gradient = backward / 2;
      costs.weight_gradient = backward - backward / 2;
    } else {
      costs.input_gradient = time("input_gradient");
      costs.weight_gradient = time("weight_gradient");
    }
    if (json_.contains("transfer")) costs.transfer = time("transfer");
    if (json_.contains("activation")) costs.activation = memory("activation");
    if (json_.contains("weight_input")) costs.weight_input = memory("weight_input");
    if (json_.contains("recomputation")) costs.recomputation = memory("recomputation");
    return costs;
  }

 private:
  void check_key(const std::string& key) const {
    constexpr std::array<const char*, 8> kKeys = {"forward",         "backward",     "input_gradient",
                                                  "weight_gradient", "transfer",     "activation",
                                                  "weight_input",    "recomputation"};
    for (const char* known : kKeys) {
      if (key == known) return;
    }
    throw_invalid(
        fmt::format("--costs-file: stages[{}] has an unknown key '{}'; expected forward, backward (or "
                    "input_gradient and weight_gradient), transfer, activation, weight_input, recomputation",
                    number_, key));
  }

  double number(const char* key) const {
    const auto value = json_.find(key);
    if (value == json_.end()) throw_invalid(fmt::format("--costs-file: stages[{}] has no {}", number_, key));
    if (!value->is_number()) {
      throw_invalid(fmt::format("--costs-file: {} of stages[{}] is not a number", key, number_));
    }
    return value->get<double>();
  }

  Duration time(const char* key) const {
    return from_milliseconds(fmt::format("--costs-file: {} of stages[{}] is", key, number_), number(key));
  }

  double memory(const char* key) const {
    const double value = number(key);
    if (value >= 0 && value <= kMostMemory) return value;
    throw_invalid(fmt::format("--costs-file: {} of stages[{}] is {}; expected from 0 to {}", key, number_,
                              value, kMostMemory));
  }

  const nlohmann::json& json_;
  const std::size_t number_;
};

}  // namespace

CostsByRank parse_costs(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) throw_invalid("--costs-file: the file is not JSON");
  if (!json.is_object() || !json.contains("stages") || !json["stages"].is_array() || json["stages"].empty()) {
    throw_invalid("--costs-file: expected {\"stages\": [{\"forward\": 1, \"backward\": 2}, ...]}");
  }
  CostsByRank all;
  if (json.contains("memory")) {
    if (json["memory"] != "bytes") {
      throw_invalid(fmt::format("--costs-file: memory is {}; the only unit is \"bytes\", or remove the key",
                                json["memory"].dump()));
    }
    all.unit = MemoryUnit::kBytes;
  }
  for (const auto& stage : json["stages"]) all.costs.push_back(Entry(stage, all.costs.size()).read());
  return all;
}

double memory_limit(const ScheduleOptions& options, MemoryUnit unit) {
  const std::string& text = options.memory;
  if (text.empty()) return std::numeric_limits<double>::infinity();
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string suffix = end;
  const auto found = std::find_if(kByteUnits.begin(), kByteUnits.end(),
                                  [&](const ByteUnit& each) { return suffix == each.name; });
  const bool known = end != text.c_str() && (suffix.empty() || found != kByteUnits.end());
  if (!known || !(number >= 0)) {
    throw_invalid(
        fmt::format("--memory {}: expected activations of a micro-batch, bytes (4GiB, 512MiB, 100B), or 0 "
                    "for no limit",
                    text));
  }
  if (!suffix.empty() && unit != MemoryUnit::kBytes) {
    throw_invalid(
        fmt::format("--memory {}: the costs do not say how many bytes an activation has; give a --costs-file "
                    "with \"memory\": \"bytes\", which costs_json(pipeline::measure_costs(...), "
                    "MemoryUnit::kBytes) writes",
                    text));
  }
  if (number == 0) return std::numeric_limits<double>::infinity();
  return suffix.empty() ? number : number * found->bytes;
}

std::string memory_text(double amount, MemoryUnit unit) {
  if (unit != MemoryUnit::kBytes) return fmt::format("{:.4g}", amount);
  for (const ByteUnit& each : kByteUnits) {
    if (each.binary && amount >= each.bytes) return fmt::format("{:.4g} {}", amount / each.bytes, each.name);
  }
  return fmt::format("{:.4g} B", amount);
}

std::string read_file(const char* option, const std::string& file) {
  errno = 0;
  std::ifstream in(file, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(in), {}};
  if (!in.is_open() || in.bad()) throw_invalid(fmt::format("{} {}: {}", option, file, std::strerror(errno)));
  return text;
}

CostsByRank costs_by_rank(const ScheduleOptions& options) {
  if (!options.costs_file.empty()) return parse_costs(read_file("--costs-file", options.costs_file));
  Costs costs;
  costs.transfer = from_milliseconds("--transfer", options.transfer);
  if (options.costs.empty()) {
    const Duration backward = from_milliseconds("--backward", options.backward);
    costs.forward = from_milliseconds("--forward", options.forward);
    costs.input_gradient = backward / 2;
    costs.weight_gradient = backward - backward / 2;
  } else {
    if (options.costs.size() != 3) {
      throw_invalid(fmt::format("--costs has {} numbers; expected FORWARD,INPUT_GRADIENT,WEIGHT_GRADIENT",
                                options.costs.size()));
    }
    costs.forward = from_milliseconds("--costs", options.costs[0]);
    costs.input_gradient = from_milliseconds("--costs", options.costs[1]);
    costs.weight_gradient = from_milliseconds("--costs", options.costs[2]);
  }
  if (!(options.weight_input >= 0 && options.weight_input <= 1)) {
    throw_invalid(fmt::format("--weight-input {}: expected from 0 to 1 activations", options.weight_input));
  }
  costs.weight_input = options.weight_input;
  return {{costs}};
}

}  // namespace torchspan::launch
