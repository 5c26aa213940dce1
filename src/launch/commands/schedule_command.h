#pragma once
#include <string>
#include <vector>

namespace torchspan::launch {

/// The request of `torchspan schedule`. Times are in milliseconds for one micro-batch and a whole stage; each
/// chunk of the stage costs its share.
struct ScheduleOptions {
  std::string name;
  int stages = 0;
  int micro_batches = 0;
  int chunks = 0;  ///< 0: the schedule's default
  double forward = 1, backward = 2, transfer = 0;
  std::vector<double> costs;  ///< forward, input gradient, weight gradient; replaces forward and backward
  std::string costs_file;     ///< JSON with costs by stage; replaces all others
  double weight_input = 1;    ///< memory between input and weight gradient, in activations
  /// Most memory of a rank: activations of a micro-batch, the unit of the costs file, or bytes ("4GiB"); empty or 0:
  /// unlimited.
  std::string memory;
  std::string file;     ///< file for the drawing as SVG; empty for none
  std::string csv_in;   ///< file to read the schedule from instead of making it; empty for none
  std::string csv_out;  ///< file for the schedule in PyTorch's CSV format; empty for none
};

/// The names of the schedules that can be requested, separated by commas.
std::string schedule_names();

/// Returns the schedule as text: a grid, its length and idle share, each rank's idle time and peak; also
/// writes the drawing and the CSV. `best` ranks all schedules and shows the first. Throws Error{kInvalid}
/// that names the wrong option.
std::string show_schedule(const ScheduleOptions& options);

}  // namespace torchspan::launch
