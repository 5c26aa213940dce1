#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/schedule.h>

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

/// The costs of one micro-batch on each rank, or one entry for all ranks, and the unit of their memory.
struct CostsByRank {
  std::vector<schedule::Costs> costs;
  schedule::MemoryUnit unit = schedule::MemoryUnit::kAny;
};

/// The costs that the options give. Throws Error{kInvalid} that names the option.
CostsByRank costs_by_rank(const ScheduleOptions& options);

/// Parses the costs of a file: {"stages": [{"forward": 1, "backward": 2}, …]} in milliseconds. Instead of
/// `backward`, `input_gradient` and `weight_gradient` may be given; `transfer`, `activation`, `weight_input` and
/// `recomputation` are optional. "memory": "bytes" beside the stages gives the unit of the last three. Throws
/// Error{kInvalid} that names the entry.
CostsByRank parse_costs(std::string_view text);

/// The limit of ScheduleOptions::memory in the unit of the costs; infinity: none. Throws Error{kInvalid} for text that
/// is not an amount, and for bytes where the costs have another unit.
double memory_limit(const ScheduleOptions& options, schedule::MemoryUnit unit);

/// An amount of memory for people: bytes as "1.5 GiB", other units as a number.
std::string memory_text(double amount, schedule::MemoryUnit unit);

/// Returns a file's contents. Throws Error{kInvalid} that names the option.
std::string read_file(const char* option, const std::string& file);

}  // namespace torchspan::launch
