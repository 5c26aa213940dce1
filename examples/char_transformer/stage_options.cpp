#include "char_transformer/stage_options.h"

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <map>

#include <torchspan/core/error.h>

#include "devices/devices.h"

namespace char_transformer {
namespace {

std::map<std::string, torchspan::Schedule> schedules() {
  using torchspan::Schedule;
  return {{"1f1b", Schedule::k1F1B},  {"gpipe", Schedule::kGPipe}, {"arrival", Schedule::kArrival},
          {"zb-h1", Schedule::kZBH1}, {"zb-h2", Schedule::kZBH2},  {"zbv", Schedule::kZBV}};
}

}  // namespace

torchspan::Schedule StageOptions::schedule_kind() const { return schedules().at(schedule); }

void add_options(CLI::App& app, StageOptions& options) {
  add_pipeline_options(app, options);
  app.get_option("--checkpoint")
      ->description(
          "folder: save the state regularly, and resume from the newest state there, also with another "
          "number of workers");
  app.add_flag("--tied", options.model.tied, "use the embedding's matrix as the output layer, too");
  app.add_option("--schedule", options.schedule)
      ->check(CLI::IsMember({"1f1b", "gpipe", "arrival", "zb-h1", "zb-h2", "zbv"}))
      ->capture_default_str();
  devices::add_option(app, options.device);
  app.add_option("--draw", options.drawing, "SVG file for the last step and its plan");
}

void check(const StageOptions& options, int world_size) {
  check(options.model);
  check_world_size(world_size);
  const int stages = options.stages(world_size);
  if (stages <= options.model.blocks) return;
  throw torchspan::Error(torchspan::ErrorKind::kInvalid,
                         fmt::format("{} workers cannot share {} blocks: give --blocks {}, or start fewer",
                                     world_size, options.model.blocks, stages));
}

}  // namespace char_transformer
