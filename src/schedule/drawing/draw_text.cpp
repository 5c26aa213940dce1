#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include "schedule/drawing/drawing.h"

namespace torchspan::schedule {
namespace {

/// With more columns than this the drawing is coarser: actions shorter than a column then move to the right.
constexpr int kMostColumns = 512;

/// Writes one rank's line; `width` characters and `slot` nanoseconds per column.
class Row {
 public:
  Row(double slot, std::size_t width, int columns) : slot_(slot), width_(width) { idle_until(columns); }

  void add(const std::string& label, const ActionSpan& span) {
    const int begin = std::max(used_, column(span.start));
    const int end = std::max(begin + 1, column(span.end));
    idle_until(end);
    std::string cell = label;
    cell.resize(static_cast<std::size_t>(end - begin) * width_, '-');
    cell.back() = ' ';
    text_.replace(static_cast<std::size_t>(begin) * width_, cell.size(), cell);
    used_ = end;
  }

  /// Returns `name` and the line, without blanks at the end.
  std::string after(const std::string& name) const {
    const std::string line = name + text_;
    return line.substr(0, line.find_last_not_of(' ') + 1);
  }

 private:
  int column(Duration time) const {
    return static_cast<int>(std::lround(static_cast<double>(time.count()) / slot_));
  }
  void idle_until(int column) {
    while (text_.size() < static_cast<std::size_t>(column) * width_)
      text_ += "." + std::string(width_ - 1, ' ');
  }

  double slot_;
  std::size_t width_;
  std::string text_;
  int used_ = 0;  ///< columns before this one are taken
};

}  // namespace

std::string draw_text(const Timeline& timeline) {
  check(timeline, "draw_text");
  const bool shared = std::any_of(timeline.spans.begin(), timeline.spans.end(),
                                  [](const auto& spans) { return stages_of(spans).size() > 1; });
  const auto label = [&](const Action& action) {
    return shared ? to_string(action) : fmt::format("{}{}", letter(action.kind), action.micro_batch);
  };
  std::size_t width = 2;
  for (const auto& spans : timeline.spans) {
    for (const ActionSpan& span : spans) width = std::max(width, label(span.action).size() + 1);
  }
  const double makespan = static_cast<double>(timeline.makespan.count());
  const double slot =
      std::max({1.0, static_cast<double>(shortest_span(timeline).count()), makespan / kMostColumns});
  const int columns = static_cast<int>(std::lround(makespan / slot));
  const std::size_t digits = std::to_string(timeline.spans.size() - 1).size();
  std::string text;
  for (std::size_t rank = 0; rank < timeline.spans.size(); ++rank) {
    Row row(slot, width, columns);
    for (const ActionSpan& span : timeline.spans[rank]) row.add(label(span.action), span);
    text += row.after(fmt::format("rank {:<{}}  ", rank, digits)) + "\n";
  }
  return text;
}

}  // namespace torchspan::schedule
