#include <algorithm>
#include <charconv>
#include <fmt/format.h>

#include <torchspan/core/error.h>
#include <torchspan/schedule/csv.h>

#include "schedule/csv/cells.h"

namespace torchspan::schedule {
namespace {

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
    throw Error(ErrorKind::kInvalid,
                fmt::format("parse_csv: row {}, column {} ('{}'): {}", row_, column_, printable(all_), text));
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

}  // namespace torchspan::schedule
