#pragma once
#include <string>
#include <vector>

#include <torchspan/schedule/schedule.h>

/// What the makers of tables share.
namespace torchspan::schedule {

/// The most cells of one kind (stages times micro-batches) that a table may have.
inline constexpr std::int64_t kMostCells = std::int64_t{1} << 22;

/// Throws Error{kInvalid} that names the field of the shape that is too small, or says that all is too large.
void check(const Shape& shape, const std::string& schedule);
/// The same for a placement, also naming a stage whose rank is out of range; returns its number of ranks.
int check(const Placement& placement, const std::string& schedule);

/// A table without tasks for a checked placement.
Table empty_table(std::string name, const Placement& placement, int ranks);

/// Appends to each rank its forwards in the order of s + i, the step at which stage s would meet micro-batch
/// i if every stage had a rank of its own; of two stages of a rank that meet theirs at once the later comes
/// first, which sends work on. No order among ranks can deadlock in it: whatever a task waits for has a
/// smaller s + i.
void append_forwards(Table& table);

}  // namespace torchspan::schedule
