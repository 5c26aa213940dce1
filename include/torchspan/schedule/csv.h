#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torchspan/schedule.h>

/// Schedules as text in the CSV format of torch.distributed.pipelining: one line per rank, one cell per action.
namespace torchspan::schedule {

/// What a cell says. Beyond ActionKind: nothing, parameters gathered and freed again (FSDP), gradients reduced,
/// activations (F) and their gradients (B) sent and received, the wait for a send, two actions that overlap.
enum class CellKind : std::uint8_t {
  kIdle,
  kForward,
  kBackward,
  kInputGradient,
  kWeightGradient,
  kUnshard,
  kReshard,
  kReduceGradient,
  kWaitReduceGradient,
  kSendForward,
  kReceiveForward,
  kSendBackward,
  kReceiveBackward,
  kWaitSendForward,
  kWaitSendBackward,
  kOverlap,
};

/// One cell: "2F5", "0SEND_F1", "3RESHARD" (no micro-batch), "" (idle) or "(0F8;7B0)OVERLAP_F_B" (`parts`).
struct Cell {
  CellKind kind = CellKind::kIdle;
  int stage = 0;
  std::optional<int> micro_batch = std::nullopt;
  std::vector<Cell> parts = {};
  friend bool operator==(const Cell&, const Cell&) = default;
};

/// A parsed file: cells by rank.
struct Sheet {
  std::vector<std::vector<Cell>> rows;
  std::string line_end = "\r\n";
  friend bool operator==(const Sheet&, const Sheet&) = default;
};

/// Parses a file that PyTorch's `_dump_csv` writes, with or without communication, also if a spreadsheet program has
/// put a byte order mark before it. Throws Error{kInvalid} that names the row and the column (from 1) of the first
/// wrong cell.
Sheet parse_csv(std::string_view text);

/// Writes a sheet as PyTorch does. A file that parse_csv() read comes out unchanged, if all its lines end
/// alike and it has no byte order mark, quotes or blanks that PyTorch would not write.
std::string to_csv(const Sheet& sheet);

/// A table as a sheet, without idle cells and communication; PyTorch adds the latter when it loads the file.
Sheet to_sheet(const Table& table);

/// The computation of a sheet; rank and stages are those of the rows. Drops idle cells and communication, which
/// follow from the order of actions; of overlapping actions the first comes first. Throws Error{kInvalid}
/// that names row and column, or as validate().
Table to_table(const Sheet& sheet, std::string name);

}  // namespace torchspan::schedule
