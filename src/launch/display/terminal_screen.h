#pragma once
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

namespace torchspan::launch {

/// For tests: a terminal that understands the sequences that Display writes.
class TerminalScreen {
 public:
  TerminalScreen(std::size_t columns, std::size_t rows, bool rewraps)
      : columns_(columns), height_(rows), rewraps_(rewraps) {}

  void write(std::string_view text) {
    while (!text.empty()) {
      std::size_t length = 1;
      if (text.starts_with("\x1b[")) {
        length = text.find_first_of("mAKJhl") + 1;
        control(text.substr(2, length - 3), text[length - 1]);
      } else if (text[0] == '\n') {
        line_feed();
      } else if (text[0] == '\r') {
        column_ = 0;
      } else {
        put(text[0]);
      }
      text.remove_prefix(length);
    }
  }

  void resize(std::size_t columns) {
    columns_ = columns;
    if (!rewraps_) {
      for (std::size_t i = top(); i < rows_.size(); ++i)
        rows_[i].text.resize(std::min(rows_[i].text.size(), columns));
      column_ = std::min(column_, columns - 1);
      return;
    }
    std::vector<Row> before;
    before.swap(rows_);
    const std::size_t cursor = row_;
    for (std::size_t i = 0; i < before.size(); ++i) {
      std::string line = before[i].text;
      std::size_t at = i == cursor ? 0 : std::string::npos;  // of the cursor's row in the line
      while (before[i].wrapped && i + 1 < before.size()) {
        if (++i == cursor) at = line.size();
        line += before[i].text;
      }
      if (at != std::string::npos) row_ = rows_.size() + at / columns;
      do {
        rows_.push_back({line.substr(0, columns), line.size() > columns});
        line.erase(0, columns);
      } while (!line.empty());
    }
  }

  /// All lines, those that left the screen included, without the empty ones at the end.
  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    bool joined = false;
    for (const Row& row : rows_) {
      if (joined) {
        all.back() += row.text;
      } else {
        all.push_back(row.text);
      }
      joined = row.wrapped;
    }
    while (!all.empty() && all.back().empty()) all.pop_back();
    return all;
  }

 private:
  struct Row {
    std::string text = {};
    bool wrapped = false;
  };

  std::size_t top() const { return rows_.size() > height_ ? rows_.size() - height_ : 0; }

  void line_feed() {
    column_ = 0;  // as a terminal's line discipline
    if (++row_ == rows_.size()) rows_.emplace_back();
  }

  void put(char character) {
    if (column_ == columns_) {
      if (wraps_) {
        rows_[row_].wrapped = true;
        line_feed();
      } else {
        --column_;
      }
    }
    std::string& text = rows_[row_].text;
    if (text.size() <= column_) text.resize(column_ + 1, ' ');
    text[column_++] = character;
  }

  void control(std::string_view parameter, char command) {
    if (parameter == "?7") wraps_ = command == 'h';
    if (command == 'A') {
      const auto up = static_cast<std::size_t>(std::atoi(std::string(parameter).c_str()));
      row_ = std::max(row_ - std::min(up, row_), top());
    }
    if (command != 'K' && command != 'J') return;
    Row& row = rows_[row_];
    row.text.resize(std::min(row.text.size(), column_));
    row.wrapped = false;
    for (std::size_t i = row_ + 1; command == 'J' && i < rows_.size(); ++i) rows_[i] = {};
  }

  std::size_t columns_;
  const std::size_t height_;
  const bool rewraps_;
  bool wraps_ = true;
  std::vector<Row> rows_{1};
  std::size_t row_ = 0, column_ = 0;
};

}  // namespace torchspan::launch
