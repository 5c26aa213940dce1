#include <algorithm>
#include <array>
#include <charconv>
#include <fmt/format.h>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

struct Name {
  CellKind kind;
  std::string_view name;
};

constexpr std::array<Name, 16> kNames = {{{CellKind::kIdle, ""},
                                          {CellKind::kForward, "F"},
                                          {CellKind::kBackward, "B"},
                                          {CellKind::kInputGradient, "I"},
                                          {CellKind::kWeightGradient, "W"},
                                          {CellKind::kUnshard, "UNSHARD"},
                                          {CellKind::kReshard, "RESHARD"},
                                          {CellKind::kReduceGradient, "REDUCE_GRAD"},
                                          {CellKind::kWaitReduceGradient, "WAIT_REDUCE_GRAD"},
                                          {CellKind::kSendForward, "SEND_F"},
                                          {CellKind::kReceiveForward, "RECV_F"},
                                          {CellKind::kSendBackward, "SEND_B"},
                                          {CellKind::kReceiveBackward, "RECV_B"},
                                          {CellKind::kWaitSendForward, "WAIT_SEND_F"},
                                          {CellKind::kWaitSendBackward, "WAIT_SEND_B"},
                                          {CellKind::kOverlap, "OVERLAP_F_B"}}};

constexpr std::array<std::pair<CellKind, ActionKind>, 4> kComputations = {
    {{CellKind::kForward, ActionKind::kForward},
     {CellKind::kBackward, ActionKind::kBackward},
     {CellKind::kInputGradient, ActionKind::kInputGradient},
     {CellKind::kWeightGradient, ActionKind::kWeightGradient}}};

/// "F", "SEND_F", "OVERLAP_F_B"; empty for kIdle.
std::string_view cell_name(CellKind kind) {
  for (const Name& known : kNames) {
    if (known.kind == kind) return known.name;
  }
  return "?";
}

/// The kind that a name stands for; nullopt for an unknown name, "" and OVERLAP_F_B.
std::optional<CellKind> cell_kind(std::string_view name) {
  for (const Name& known : kNames) {
    if (known.name == name && !name.empty() && known.kind != CellKind::kOverlap) return known.kind;
  }
  return std::nullopt;
}

/// All names, for an error message.
std::string cell_names() {
  std::string names;
  for (const Name& known : kNames) {
    if (!known.name.empty()) names += (names.empty() ? "" : ", ") + std::string(known.name);
  }
  return names;
}

bool has_micro_batch(CellKind kind) {
  switch (kind) {
    case CellKind::kIdle:
    case CellKind::kUnshard:
    case CellKind::kReshard:
    case CellKind::kReduceGradient:
    case CellKind::kWaitReduceGradient:
    case CellKind::kOverlap:
      return false;
    default:
      return true;
  }
}

/// The computation that a kind stands for.
std::optional<ActionKind> computation(CellKind kind) {
  for (const auto& [cell, action] : kComputations) {
    if (cell == kind) return action;
  }
  return std::nullopt;
}

CellKind cell_of(ActionKind kind) {
  for (const auto& [cell, action] : kComputations) {
    if (action == kind) return cell;
  }
  return CellKind::kIdle;
}

/// The start of a text with its unprintable characters replaced, for an error message.
std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 40;
  std::string result;
  std::transform(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(std::min(text.size(), kMost)),
                 std::back_inserter(result), [](char c) { return c >= ' ' && c <= '~' ? c : '?'; });
  return text.size() > kMost ? result + "..." : result;
}

/// Reads the text of one cell; `row` and `column` count from 1.
class CellReader {
 public:
  CellReader(std::string_view text, std::size_t row, std::size_t column)
      : all_(text), text_(text), row_(row), column_(column) {}

  Cell read() {
    skip_blanks();
    if (text_.starts_with('"')) unquote();
    Cell cell;
    if (!text_.empty()) cell = text_.front() == '(' ? read_overlap() : read_action();
    skip_blanks();
    if (!text_.empty()) fail(fmt::format("unexpected '{}' after the action", printable(text_)));
    return cell;
  }

 private:
  Cell read_overlap() {
    Cell overlap{.kind = CellKind::kOverlap};
    do {
      text_.remove_prefix(1);
      skip_blanks();
      overlap.parts.push_back(read_action());
      skip_blanks();
    } while (text_.starts_with(';'));
    const std::string end = std::string(")") + std::string(cell_name(CellKind::kOverlap));
    if (!text_.starts_with(end)) fail(fmt::format("expected '{}' after the overlapping actions", end));
    text_.remove_prefix(end.size());
    return overlap;
  }

  Cell read_action() {
    Cell cell;
    cell.stage = read_number("a stage");
    const auto letters =
        std::find_if(text_.begin(), text_.end(), [](char c) { return c != '_' && (c < 'A' || c > 'Z'); });
    const auto length = static_cast<std::size_t>(letters - text_.begin());
    const auto kind = cell_kind(text_.substr(0, length));
    if (!kind) {
      fail(fmt::format("'{}' is not an action; the actions are {}", printable(text_.substr(0, length)),
                       cell_names()));
    }
    cell.kind = *kind;
    text_.remove_prefix(length);
    if (has_micro_batch(cell.kind)) cell.micro_batch = read_number("a micro-batch");
    return cell;
  }

  int read_number(const char* what) {
    int number = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), number);
    if (error == std::errc::result_out_of_range) fail(fmt::format("{} is too large", what));
    if (error != std::errc() || text_.front() == '-') {
      fail(fmt::format("expected {} before '{}'; actions look like 2F0 or 1UNSHARD", what, printable(text_)));
    }
    text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
    return number;
  }

  void skip_blanks() {
    while (text_.starts_with(' ') || text_.starts_with('\t')) text_.remove_prefix(1);
  }

  void unquote() {
    text_.remove_prefix(1);
    const std::size_t end = text_.find('"');
    if (end == std::string_view::npos || end + 1 != text_.size()) fail("a quoted cell has no end");
    text_.remove_suffix(1);
  }

  [[noreturn]] void fail(const std::string& text) const {
    throw_invalid("parse_csv: row {}, column {} ('{}'): {}", row_, column_, printable(all_), text);
  }

  const std::string_view all_;
  std::string_view text_;
  const std::size_t row_;
  const std::size_t column_;
};

std::vector<Cell> parse_row(std::string_view line, std::size_t row) {
  std::vector<Cell> cells;
  if (line.empty()) return cells;
  for (std::size_t column = 1;; ++column) {
    const std::size_t comma = line.find(',');
    cells.push_back(CellReader(line.substr(0, comma), row, column).read());
    if (comma == std::string_view::npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

}  // namespace

Sheet parse_csv(std::string_view text) {
  constexpr std::string_view kByteOrderMark =
      "\xEF\xBB\xBF";  // spreadsheet programs begin UTF-8 files with it
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  Sheet sheet;
  const std::size_t first_end = text.find('\n');
  const bool is_unix = first_end != std::string_view::npos && (first_end == 0 || text[first_end - 1] != '\r');
  if (is_unix) sheet.line_end = "\n";
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (line.ends_with('\r')) line.remove_suffix(1);
    sheet.rows.push_back(parse_row(line, sheet.rows.size() + 1));
  }
  return sheet;
}

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

namespace {

/// Collects the computations of a sheet. Memory depends on the number of cells, not on the numbers in them.
class SheetReader {
 public:
  explicit SheetReader(const Sheet& sheet, std::string name) : sheet_(sheet) {
    table_.name = std::move(name);
    table_.actions.resize(sheet.rows.size());
  }

  Table read() {
    for_each([this](const Cell& cell) { add(cell); });
    place_stages();
    for_each([this](const Cell& cell) { check_communication(cell); });
    validate(table_);
    return std::move(table_);
  }

 private:
  template <class Visit>
  void for_each(Visit visit) {
    for (row_ = 0; row_ < sheet_.rows.size(); ++row_) {
      const auto& row = sheet_.rows[row_];
      for (column_ = 0; column_ < row.size(); ++column_) {
        if (row[column_].kind != CellKind::kOverlap) {
          visit(row[column_]);
          continue;
        }
        for (const Cell& part : row[column_].parts) visit(part);
      }
    }
  }

  void add(const Cell& cell) {
    const auto kind = computation(cell.kind);
    if (!kind) return;
    const int micro_batch = cell.micro_batch.value_or(-1);
    if (cell.stage < 0 || micro_batch < 0) fail("stage and micro-batch must be at least 0");
    const int rank = static_cast<int>(row_);
    const auto [known, is_new] = rank_of_stage_.emplace(cell.stage, rank);
    if (!is_new && known->second != rank) {
      fail(fmt::format("stage {} is also in row {}; a stage belongs to one rank", cell.stage,
                       known->second + 1));
    }
    micro_batches_ = std::max(micro_batches_, std::int64_t{micro_batch} + 1);
    if (*kind == ActionKind::kForward) ++forwards_;
    table_.actions[row_].push_back({*kind, cell.stage, micro_batch});
  }

  void place_stages() {
    if (rank_of_stage_.empty()) {
      throw_invalid("schedule '{}': the sheet has no forward (cells such as 0F0)", table_.name);
    }
    for (const auto& [stage, rank] : rank_of_stage_) {
      const int expected = table_.stages();
      if (stage != expected) {
        throw_invalid("schedule '{}': no row has stage {}, but row {} has stage {}", table_.name, expected,
                      rank + 1, stage);
      }
      table_.rank_of_stage.push_back(rank);
    }
    // Stops numbers that would make the checks of the table large.
    if (forwards_ < micro_batches_ * table_.stages()) {
      throw_invalid(
          "schedule '{}': {} forwards for {} stages and {} micro-batches; each stage needs a forward of each "
          "micro-batch from 0 on",
          table_.name, forwards_, table_.stages(), micro_batches_);
    }
    table_.micro_batches = static_cast<int>(micro_batches_);
  }

  void check_communication(const Cell& cell) const {
    if (cell.kind == CellKind::kIdle) return;
    const auto known = rank_of_stage_.find(cell.stage);
    if (known == rank_of_stage_.end()) {
      fail(fmt::format("there is no stage {}; there are {}", cell.stage, table_.stages()));
    }
    if (known->second != static_cast<int>(row_)) {
      fail(fmt::format("stage {} belongs to row {}", cell.stage, known->second + 1));
    }
    if (cell.micro_batch && (*cell.micro_batch < 0 || *cell.micro_batch >= table_.micro_batches)) {
      fail(fmt::format("there is no micro-batch {}; there are {}", *cell.micro_batch, table_.micro_batches));
    }
  }

  [[noreturn]] void fail(const std::string& text) const {
    throw_invalid("schedule '{}': row {}, column {}: {}", table_.name, row_ + 1, column_ + 1, text);
  }

  const Sheet& sheet_;
  std::size_t row_ = 0;
  std::size_t column_ = 0;
  Table table_;
  std::map<int, int> rank_of_stage_;
  std::int64_t micro_batches_ = 0;
  std::int64_t forwards_ = 0;
};

}  // namespace

Table to_table(const Sheet& sheet, std::string name) { return SheetReader(sheet, std::move(name)).read(); }

}  // namespace torchspan::schedule
