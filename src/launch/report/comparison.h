#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/report/verdict.h"

namespace torchspan::launch {

/// A figure of two runs.
struct ComparedFigure {
  enum class Unit : std::uint8_t { kTime, kBytes, kShare };
  std::string name;
  Unit unit = Unit::kTime;  ///< nanoseconds, bytes, 0 to 1
  double before = 0;
  double after = 0;
  /// Whether the steps vary less than the two medians differ; nullopt where the trace has one value of a run.
  std::optional<bool> is_clear = {};

  /// "+22 %", "1.8 times", "+3 points"; "–" without a value before.
  std::string change() const;
  /// "12.3 ms", "4.2 MiB", "31 %".
  std::string text(double value) const;
};

struct RunComparison {
  std::string run;                      ///< id of the earlier run
  std::vector<ComparedFigure> figures;  ///< only those that both runs have
  std::vector<std::string> notes;  ///< why the runs may not be comparable: other numbers of workers, hosts
};

/// Compares a run with an earlier one: steps, where their time goes, pipelines, functions, traffic and memory. Two
/// medians of steps differ clearly if their notches do not overlap (McGill, Tukey, Larsen, "Variations of Box
/// Plots", 1978). Pure.
RunComparison compare_runs(const TraceSet& before, const RunFigures& before_figures, const TraceSet& after,
                           const RunFigures& after_figures);

/// Returns one line for each figure of steps and pipelines, then the notes.
std::string describe_comparison(const RunComparison& comparison);

}  // namespace torchspan::launch
