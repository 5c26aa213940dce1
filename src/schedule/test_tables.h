#pragma once
#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <torchspan/schedule.h>

namespace torchspan::schedule {

/// A rank's forward of one step costs this many nanoseconds, so that it divides evenly among up to 8 chunks.
inline constexpr int kUnit = 840;

/// Costs of one of a rank's `chunks` stages; all of them together cost `forward` and `input` + `weight` units
/// and hold one activation.
inline std::vector<Costs> unit_costs(int chunks = 1, int forward = 1, int input = 1, int weight = 1) {
  const Duration unit{kUnit / chunks};
  return {{.forward = forward * unit,
           .input_gradient = input * unit,
           .weight_gradient = weight * unit,
           .transfer = Duration{0},
           .activation = 1.0 / chunks}};
}

inline double in_units(Duration time) { return static_cast<double>(time.count()) / kUnit; }

/// "0F0 0F1 0B0": a rank's actions in one line.
inline std::string line_of(const std::vector<Action>& actions) {
  std::string line;
  for (const Action& action : actions) line += (line.empty() ? "" : " ") + to_string(action);
  return line;
}

/// Parses a rank's actions from such a line.
inline std::vector<Action> actions_of(const std::string& line) {
  std::vector<Action> actions;
  std::istringstream words(line);
  for (Action action; words >> action.stage;) {
    char kind = ' ';
    words >> kind >> action.micro_batch;
    action.kind = static_cast<ActionKind>(std::string("FBIW").find(kind));
    actions.push_back(action);
  }
  return actions;
}

/// A random placement of up to 8 stages on up to 5 ranks, which may reuse ranks; some ranks may have no
/// stage.
inline Placement random_placement(std::mt19937_64& random) {
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  Placement placement{.rank_of_stage = {}, .micro_batches = 1 + up_to(9), .ranks = 1 + up_to(5)};
  for (int stage = 1 + up_to(8); stage > 0; --stage) {
    const bool repeat = !placement.rank_of_stage.empty() && up_to(3) == 0;
    placement.rank_of_stage.push_back(repeat ? placement.rank_of_stage.back() : up_to(placement.ranks));
  }
  return placement;
}

inline std::string describe(const Placement& placement) {
  std::string text = std::to_string(placement.micro_batches) + " micro-batches, ranks of stages:";
  for (int rank : placement.rank_of_stage) text += " " + std::to_string(rank);
  return text;
}

}  // namespace torchspan::schedule
