#pragma once
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/schedule.h>
#include <torchspan/schedule/compare.h>

#include "launch/commands/schedule_command.h"

namespace torchspan::launch {

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
