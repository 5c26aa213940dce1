#pragma once
#include <string>

namespace torchspan::launch {

/// What `torchspan schedule` was asked to show. Times are milliseconds that one micro-batch costs a whole
/// stage; each of its chunks costs its share.
struct ScheduleOptions {
  std::string name;
  int stages = 0;
  int micro_batches = 0;
  int chunks = 1;
  double forward = 1, backward = 2, transfer = 0;
  std::string file;  ///< where the drawing goes as SVG; empty: nowhere
};

/// The names that a schedule can be asked for by, with commas.
std::string schedule_names();

/// The schedule as text: a grid, its length and idle share, each rank's idle time and peak; also writes the
/// drawing. Throws Error{kInvalid} that names the option.
std::string show_schedule(const ScheduleOptions& options);

}  // namespace torchspan::launch
