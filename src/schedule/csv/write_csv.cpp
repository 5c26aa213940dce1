#include "schedule/csv/cells.h"

namespace torchspan::schedule {
namespace {

std::string text_of(const Cell& cell) {
  if (cell.kind == CellKind::kIdle) return "";
  const std::string name(cell_name(cell.kind));
  if (cell.kind == CellKind::kOverlap) {
    std::string parts;
    for (const Cell& part : cell.parts) parts += (parts.empty() ? "" : ";") + text_of(part);
    return "(" + parts + ")" + name;
  }
  return std::to_string(cell.stage) + name + (cell.micro_batch ? std::to_string(*cell.micro_batch) : "");
}

}  // namespace

std::string to_csv(const Sheet& sheet) {
  std::string text;
  for (const auto& row : sheet.rows) {
    std::string line;
    for (std::size_t column = 0; column < row.size(); ++column) {
      line += (column == 0 ? "" : ",") + text_of(row[column]);
    }
    // A single idle cell is quoted, which distinguishes it from a rank without cells.
    if (row.size() == 1 && line.empty()) line = "\"\"";
    text += line + sheet.line_end;
  }
  return text;
}

Sheet to_sheet(const Table& table) {
  Sheet sheet;
  for (const auto& actions : table.actions) {
    auto& row = sheet.rows.emplace_back();
    for (const Action& action : actions) {
      row.push_back({.kind = cell_of(action.kind), .stage = action.stage, .micro_batch = action.micro_batch});
    }
  }
  return sheet;
}

}  // namespace torchspan::schedule
