#pragma once
#include <string>

namespace torchspan::launch {

/// The request of `torchspan schedule`. Times are in milliseconds for one micro-batch and a whole stage; each
/// chunk of the stage costs its share.
struct ScheduleOptions {
  std::string name;
  int stages = 0;
  int micro_batches = 0;
  int chunks = 1;
  double forward = 1, backward = 2, transfer = 0;
  std::string file;  ///< file for the drawing as SVG; empty for none
};

/// The names of the schedules that can be requested, separated by commas.
std::string schedule_names();

/// Returns the schedule as text: a grid, its length and idle share, each rank's idle time and peak; also
/// writes the drawing. Throws Error{kInvalid} that names the wrong option.
std::string show_schedule(const ScheduleOptions& options);

}  // namespace torchspan::launch
