#pragma once
#include <string>

#include <torchspan/pipeline.h>

#include "char_transformer/training_options.h"

namespace char_transformer {

/// Options of the program char_transformer_pipeline.
struct StageOptions : PipelineTrainingOptions {
  std::string schedule = "1f1b";
  std::string device = "cpu";
  std::string drawing;  ///< file; empty: none

  torchspan::Schedule schedule_kind() const;
  /// Schedules with split backwards visit each stage once.
  bool visits_stages_once() const { return schedule.starts_with("zb"); }
  /// ZBV has two stages on each worker.
  int stages(int workers) const { return workers * (schedule == "zbv" ? 2 : 1); }
};

void add_options(CLI::App& app, StageOptions& options);
/// Throws torchspan::Error{kInvalid}, with a remedy, for options that do not fit this number of workers.
void check(const StageOptions& options, int world_size);

}  // namespace char_transformer
