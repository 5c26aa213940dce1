#pragma once
#include <string>
#include <vector>

#include <torchspan/schedule.h>

/// Functions that the schedules share.
namespace torchspan::schedule {

/// The most cells of one kind (stages times micro-batches) in a table.
inline constexpr std::int64_t kMostCells = std::int64_t{1} << 22;

/// Throws Error{kInvalid} that names the field of the shape that is too small, or reports that the table is
/// too large.
void check(const Shape& shape, const std::string& schedule);
/// The same for a placement; also names a stage whose rank is out of range. Returns the number of ranks.
int check(const Placement& placement, const std::string& schedule);
/// Refuses any other number of stages per rank than `expected`; `instead` ends the message.
void check_stages_per_rank(const Shape& shape, const std::string& schedule, int expected,
                           const std::string& instead = "");
/// Throws Error{kInvalid} unless there is one entry for all stages or one for each, none negative.
void check(const std::vector<Costs>& costs, std::size_t stages, const std::string& function);

/// A table without actions for a checked placement.
Table empty_table(std::string name, const Placement& placement, int ranks);

/// Appends each rank's forwards in the order of s + i, the step at which stage s would run micro-batch i if
/// every stage had a separate rank. If two stages of a rank are due in the same step, the later stage comes
/// first, which sends results on. Such an order cannot deadlock: an action waits only for actions with a smaller s
/// + i.
void append_forwards(Table& table);

}  // namespace torchspan::schedule
