#pragma once
#include <string_view>
#include <vector>

#include <torchspan/schedule.h>

#include "launch/commands/schedule_command.h"

namespace torchspan::launch {

/// The costs of one micro-batch on each rank, or one entry for all ranks. Throws Error{kInvalid} that names
/// the option.
std::vector<schedule::Costs> costs_by_rank(const ScheduleOptions& options);

/// Parses the costs of a file: {"stages": [{"forward": 1, "backward": 2}, …]} in milliseconds. Instead of
/// `backward`, `input_gradient` and `weight_gradient` may be given; `transfer`, `activation` and
/// `weight_input` are optional. Throws Error{kInvalid} that names the entry.
std::vector<schedule::Costs> parse_costs(std::string_view text);

/// Returns a file's contents. Throws Error{kInvalid} that names the option.
std::string read_file(const char* option, const std::string& file);

}  // namespace torchspan::launch
