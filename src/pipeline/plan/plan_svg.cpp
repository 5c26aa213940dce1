#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <iterator>
#include <map>
#include <utility>

#include <torchspan/pipeline/plan.h>

#include "core/api/xml.h"

namespace torchspan::pipeline {
namespace {

constexpr double kMargin = 16;
constexpr double kBoxHeight = 42;
constexpr double kCharWidth = 6.7;  ///< width of a letter of 12 points
constexpr double kLane = 18;        ///< between two adjacent skips
constexpr double kRowGap = 22;      ///< between two rows, without lanes
constexpr double kColumnGap = 40;   ///< between two boxes, without lanes
constexpr double kCorner = 7;
constexpr std::size_t kLongestName = 22;

/// Colors that readers with color blindness can distinguish (Okabe and Ito, 2008). The plain fill is for
/// layers that are used once.
constexpr const char* kPlainFill = "#f4f4f4";
constexpr std::array<const char*, 5> kFills = {"#cfe7f7", "#fbe3b5", "#cdeee2", "#f3d9e8", "#fdf6bd"};
constexpr std::array<const char*, 5> kStrokes = {"#d55e00", "#0072b2", "#009e73", "#cc79a7", "#8a6d00"};

/// Shortens a name to the width of a box. Keeps the end, which differs more often than the beginning.
std::string shortened(const std::string& name) {
  return name.size() <= kLongestName ? name : "…" + name.substr(name.size() - kLongestName + 1);
}

struct Point {
  double x = 0;
  double y = 0;
};

/// A path along `points`, at right angles, with rounded corners.
std::string rounded_path(const std::vector<Point>& points) {
  std::string path = fmt::format("M{:.1f} {:.1f}", points.front().x, points.front().y);
  for (std::size_t i = 1; i + 1 < points.size(); ++i) {
    const Point &before = points[i - 1], &corner = points[i], &after = points[i + 1];
    const auto towards = [&](const Point& other) {
      const double dx = other.x - corner.x, dy = other.y - corner.y;
      const double length = std::max(std::abs(dx) + std::abs(dy), 1e-9);
      const double share = std::min(kCorner, length / 2) / length;
      return Point{corner.x + dx * share, corner.y + dy * share};
    };
    const Point from = towards(before), to = towards(after);
    path += fmt::format(" L{:.1f} {:.1f} Q{:.1f} {:.1f} {:.1f} {:.1f}", from.x, from.y, corner.x, corner.y,
                        to.x, to.y);
  }
  return path + fmt::format(" L{:.1f} {:.1f}", points.back().x, points.back().y);
}

/// The path of a skip connection between the rows: a lane in the gap next to each end, and, if these gaps
/// differ, a lane in the gap before the column of its pop.
struct SkipPath {
  std::string name;
  int from = 0;  ///< orders
  int to = 0;
  int from_gap = 0;  ///< gap g is above row g
  int to_gap = 0;
  int from_lane = 0, to_lane = 0, column_lane = 0;
  int leaves_as = 0, arrives_as = 0;  ///< index among the skips at the same side of the box
};

class PlanPicture {
 public:
  explicit PlanPicture(const Plan& plan) : plan_(plan) {
    collect_skips();
    measure();
  }

  std::string draw() {
    add_rows();
    add_layer_ranges();
    add_skips();
    add_arrows();
    add_boxes();
    const double width = columns_.back() + box_width_ + kColumnGap + 44 + kMargin;
    const double height = rows_.back() + kBoxHeight + gap_height(row_count()) + kMargin;
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" viewBox=\"0 0 "
        "{0:.0f} "
        "{1:.0f}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n",
        width, height);
    svg += "<defs>\n" + markers_ + "</defs>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    return svg + body_ + labels_above_ + "</svg>\n";
  }

 private:
  int row_count() const { return static_cast<int>(plan_.worker_of_stage.size()); }
  int row_of(int order) const { return plan_.invocations[static_cast<std::size_t>(order)].here.stage; }
  double x_of(int order) const { return columns_[static_cast<std::size_t>(order)]; }
  double y_of(int order) const { return rows_[static_cast<std::size_t>(row_of(order))]; }
  double gap_height(int gap) const {
    const auto lanes = gap_lanes_.find(gap);
    return kRowGap + (lanes == gap_lanes_.end() ? 0 : kLane * lanes->second);
  }

  void collect_skips() {
    std::vector<std::pair<std::pair<int, int>, std::string>> all;
    for (const LocalSkip& skip : plan_.local_skips)
      all.push_back({{skip.stashed_by, skip.popped_by}, skip.name});
    for (const Link& link : plan_.links) {
      if (!link.skip.empty()) all.push_back({{link.stashed_by, link.popped_by}, link.skip});
    }
    // Short skips next to the boxes, long ones around them.
    std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return a.first.second - a.first.first < b.first.second - b.first.first;
    });
    for (auto& [ends, name] : all) {
      SkipPath skip_path;
      skip_path.name = std::move(name);
      std::tie(skip_path.from, skip_path.to) = ends;
      const int from_row = row_of(skip_path.from), to_row = row_of(skip_path.to);
      skip_path.from_gap = from_row < to_row ? from_row + 1 : from_row;
      skip_path.to_gap = to_row < from_row ? to_row + 1 : to_row;
      skip_path.from_lane = gap_lanes_[skip_path.from_gap]++;
      skip_path.to_lane =
          skip_path.to_gap == skip_path.from_gap ? skip_path.from_lane : gap_lanes_[skip_path.to_gap]++;
      if (skip_path.to_gap != skip_path.from_gap) skip_path.column_lane = column_lanes_[skip_path.to]++;
      skip_path.leaves_as = ports_[{skip_path.from, skip_path.from_gap}]++;
      skip_path.arrives_as = ports_[{skip_path.to, skip_path.to_gap}]++;
      skip_paths_.push_back(std::move(skip_path));
    }
  }

  void measure() {
    std::size_t longest = 8;
    for (std::size_t order = 0; order < plan_.invocations.size(); ++order)
      longest = std::max(longest, shortened(use_name(order)).size());
    box_width_ = kCharWidth * static_cast<double>(longest) + 18;
    std::size_t label = 0;
    for (const std::string& worker : plan_.workers) label = std::max(label, worker.size());
    labels_ = kCharWidth * static_cast<double>(std::max<std::size_t>(label, 8)) + 16;
    double x = kMargin + labels_ + 56;
    for (int order = 0; order < static_cast<int>(plan_.invocations.size()); ++order) {
      if (order > 0) x += box_width_ + kColumnGap + 10 * column_lanes_[order];
      columns_.push_back(x);
    }
    double y = kMargin;
    for (int row = 0; row < row_count(); ++row) {
      y += gap_height(row) + (row > 0 ? kBoxHeight : 0);
      rows_.push_back(y);
    }
  }

  std::string use_name(std::size_t order) const {
    const auto layer = static_cast<std::size_t>(plan_.invocations[order].layer);
    const std::string& method = plan_.methods[order];
    return plan_.layers[layer] + (method.empty() ? "" : "." + method);
  }

  void add_rows() {
    const double right = columns_.back() + box_width_ + 24;
    for (int row = 0; row < row_count(); ++row) {
      const double y = rows_[static_cast<std::size_t>(row)];
      const auto worker = static_cast<std::size_t>(plan_.worker_of_stage[static_cast<std::size_t>(row)]);
      body_ += fmt::format(
          "<rect x=\"{0}\" y=\"{1:.1f}\" width=\"{2:.1f}\" height=\"{3}\" rx=\"4\" fill=\"#fafbfc\" "
          "stroke=\"#e3e6ea\"/>\n<text x=\"{4}\" y=\"{5:.1f}\" font-weight=\"bold\">stage {6}</text>\n"
          "<text x=\"{4}\" y=\"{7:.1f}\" fill=\"#555\">{8}</text>\n",
          kMargin, y - 8, right - kMargin, kBoxHeight + 16, kMargin + 8, y + 18, row, y + 34,
          escape_xml(plan_.workers[worker]));
    }
  }

  /// A layer range runs as one action.
  void add_layer_ranges() {
    for (std::size_t s = 0; s < plan_.layer_ranges.size(); ++s) {
      const LayerRange& range = plan_.layer_ranges[s];
      body_ += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" rx=\"8\" fill=\"#eceff3\">"
          "<title>layer range {}</title></rect>\n",
          x_of(range.first) - 6, y_of(range.first) - 6,
          x_of(range.last) + box_width_ - x_of(range.first) + 12, kBoxHeight + 12, s);
    }
  }

  /// A color for each layer that is used more than once.
  std::string fill_of(int layer) {
    const auto uses = std::count_if(plan_.invocations.begin(), plan_.invocations.end(),
                                    [&](const Invocation& each) { return each.layer == layer; });
    if (uses < 2) return kPlainFill;
    const auto [found, fresh] = fills_.emplace(layer, fills_.size());
    return kFills[found->second % kFills.size()];
  }

  void add_boxes() {
    for (std::size_t i = 0; i < plan_.invocations.size(); ++i) {
      const Invocation& use = plan_.invocations[i];
      const double x = x_of(use.order), y = y_of(use.order), middle = x + box_width_ / 2;
      body_ += fmt::format(
          "<g><title>{}</title><rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" rx=\"5\" "
          "fill=\"{}\" stroke=\"#667\"/>\n",
          escape_xml(plan_.describe(use.order)), x, y, box_width_, kBoxHeight, fill_of(use.layer));
      body_ += fmt::format(
          "<text x=\"{0:.1f}\" y=\"{1:.1f}\" text-anchor=\"middle\">{2}</text>\n<text x=\"{0:.1f}\" "
          "y=\"{3:.1f}\" text-anchor=\"middle\" font-size=\"10\" fill=\"#666\">order {4}</text></g>\n",
          middle, y + 18, escape_xml(shortened(use_name(i))), y + 33, use.order);
    }
  }

  /// Returns the id of the arrow head in a color; defines it at the first use.
  std::string marker(const std::string& color) {
    const std::string id = "head" + color.substr(1);
    if (markers_.find(id + "\"") == std::string::npos) {
      markers_ += fmt::format(
          "<marker id=\"{}\" viewBox=\"0 0 8 8\" refX=\"7.5\" refY=\"4\" markerWidth=\"7\" "
          "markerHeight=\"7\" "
          "orient=\"auto\"><path d=\"M0 0.5 L8 4 L0 7.5 Z\" fill=\"{}\"/></marker>\n",
          id, color);
    }
    return id;
  }

  void add_arrow(const std::string& path) {
    body_ += fmt::format(
        "<path d=\"{}\" fill=\"none\" stroke=\"#333\" stroke-width=\"1.5\" marker-end=\"url(#{})\"/>\n", path,
        marker("#333"));
  }

  void add_arrows() {
    const int last = static_cast<int>(plan_.invocations.size()) - 1;
    const auto middle = [&](int order) { return y_of(order) + kBoxHeight / 2; };
    body_ += fmt::format(
        "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">input</text>\n<text x=\"{:.1f}\" y=\"{:.1f}\">"
        "output</text>\n",
        x_of(0) - 30, middle(0) + 4, x_of(last) + box_width_ + 36, middle(last) + 4);
    add_arrow(fmt::format("M{:.1f} {:.1f} H{:.1f}", x_of(0) - 26, middle(0), x_of(0)));
    for (int order = 0; order < last; ++order) {
      const double from = x_of(order) + box_width_, to = x_of(order + 1);
      if (row_of(order) == row_of(order + 1)) {
        add_arrow(fmt::format("M{:.1f} {:.1f} H{:.1f}", from, middle(order), to));
        continue;
      }
      // Left of the lanes of skips, which are on the right of the gap.
      const double turn = from + (kColumnGap - 12) / 2;
      add_arrow(rounded_path({{from, middle(order)},
                              {turn, middle(order)},
                              {turn, middle(order + 1)},
                              {to, middle(order + 1)}}));
    }
    add_arrow(fmt::format("M{:.1f} {:.1f} H{:.1f}", x_of(last) + box_width_, middle(last),
                          x_of(last) + box_width_ + 32));
  }

  double lane_y(int gap, int lane) const {
    // Lanes count from the row below upwards: most skips of a gap begin or end at that row.
    const double below = gap < row_count() ? rows_[static_cast<std::size_t>(gap)]
                                           : rows_.back() + kBoxHeight + gap_height(gap);
    return below - kRowGap / 2 - 6 - kLane * lane;
  }

  void add_skips() {
    for (std::size_t i = 0; i < skip_paths_.size(); ++i) {
      const SkipPath& skip_path = skip_paths_[i];
      const char* color = kStrokes[i % kStrokes.size()];
      const auto side = [&](int order, int gap) {
        return y_of(order) + (gap > row_of(order) ? kBoxHeight : 0.0);
      };
      const double leave = x_of(skip_path.from) + box_width_ - 14 - 9 * skip_path.leaves_as;
      const double arrive = x_of(skip_path.to) + 14 + 9 * skip_path.arrives_as;
      const double first = lane_y(skip_path.from_gap, skip_path.from_lane),
                   second = lane_y(skip_path.to_gap, skip_path.to_lane);
      std::vector<Point> points{{leave, side(skip_path.from, skip_path.from_gap)}, {leave, first}};
      if (skip_path.from_gap != skip_path.to_gap) {
        const double across = x_of(skip_path.to) - 14 - 10 * skip_path.column_lane;
        points.push_back({across, first});
        points.push_back({across, second});
      }
      points.push_back({arrive, second});
      points.push_back({arrive, side(skip_path.to, skip_path.to_gap)});
      body_ += fmt::format(
          "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" stroke-dasharray=\"5 3\" "
          "marker-end=\"url(#{})\"><title>skip '{}': order {} to {}</title></path>\n",
          rounded_path(points), color, marker(color), escape_xml(skip_path.name), skip_path.from,
          skip_path.to);
      // To the right of the arrow that leaves the box, if there is room.
      const double past = x_of(skip_path.from) + box_width_ + kColumnGap - 12;
      const double end = points[2].x;
      const std::string name = shortened(skip_path.name);
      const bool fits = past + kCharWidth * static_cast<double>(name.size()) < end;
      add_label({fits ? past : leave + 8, first - 3}, color, name);
    }
  }

  /// Draws a label above all lines.
  void add_label(Point at, const char* color, const std::string& text) {
    labels_above_ += fmt::format(
        "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"10\" fill=\"{}\" stroke=\"#fff\" stroke-width=\"3\" "
        "paint-order=\"stroke\">{}</text>\n",
        at.x, at.y, color, escape_xml(text));
  }

  const Plan& plan_;
  std::vector<SkipPath> skip_paths_;
  std::map<int, int> gap_lanes_, column_lanes_;
  std::map<std::pair<int, int>, int> ports_;
  std::map<int, std::size_t> fills_;
  double box_width_ = 0;
  double labels_ = 0;
  std::vector<double> columns_, rows_;
  std::string body_, markers_, labels_above_;
};

}  // namespace

std::string to_svg(const Plan& plan) { return PlanPicture(plan).draw(); }

}  // namespace torchspan::pipeline
