#include <chrono>
#include <fmt/format.h>

#include <torchspan/schedule/compare.h>

namespace torchspan::schedule {
namespace {

double in_milliseconds(Duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

std::string costs_json(const std::vector<Costs>& costs, MemoryUnit unit) {
  std::string stages;
  for (const Costs& cost : costs) {
    stages += fmt::format(
        "{}\n  {{\"forward\": {}, \"input_gradient\": {}, \"weight_gradient\": {}, \"transfer\": {}, "
        "\"activation\": {}",
        stages.empty() ? "" : ",", in_milliseconds(cost.forward), in_milliseconds(cost.input_gradient),
        in_milliseconds(cost.weight_gradient), in_milliseconds(cost.transfer), cost.activation);
    if (cost.weight_input) stages += fmt::format(", \"weight_input\": {}", *cost.weight_input);
    if (cost.recomputation > 0) stages += fmt::format(", \"recomputation\": {}", cost.recomputation);
    stages += "}";
  }
  const std::string memory = unit == MemoryUnit::kBytes ? "\"memory\": \"bytes\", " : "";
  return "{" + memory + "\"stages\": [" + stages + "\n]}\n";
}

}  // namespace torchspan::schedule
