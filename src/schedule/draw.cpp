#include <algorithm>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <iterator>
#include <string_view>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "core/api/xml.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

void check_length(const Timeline& timeline, std::string_view function, std::string_view field,
                  std::size_t length, std::size_t expected) {
  if (length == expected) return;
  throw_invalid("{}: in timeline '{}' {} has {} entries and spans {}", function, timeline.name, field, length,
                expected);
}

/// Throws Error{kInvalid} that names the field unless idle, peak_live, live and weight_inputs (if any) are as
/// long as spans, and spans and makespan are consistent.
void check(const Timeline& timeline, std::string_view function) {
  const std::size_t ranks = timeline.spans.size();
  check_length(timeline, function, "idle", timeline.idle.size(), ranks);
  check_length(timeline, function, "peak_live", timeline.peak_live.size(), ranks);
  check_length(timeline, function, "live", timeline.live.size(), ranks);
  const bool has_weight_inputs = !timeline.weight_inputs.empty();
  if (has_weight_inputs) {
    check_length(timeline, function, "weight_inputs", timeline.weight_inputs.size(), ranks);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    check_length(timeline, function, fmt::format("live[{}]", rank), timeline.live[rank].size(),
                 timeline.spans[rank].size());
    if (has_weight_inputs) {
      check_length(timeline, function, fmt::format("weight_inputs[{}]", rank),
                   timeline.weight_inputs[rank].size(), timeline.spans[rank].size());
    }
    Duration now{0};
    for (const ActionSpan& span : timeline.spans[rank]) {
      if (span.start < now || span.end < span.start || span.end > timeline.makespan) {
        throw_invalid(
            "{}: in timeline '{}' rank {} runs {} from {} to {} ns, before {} ns or after the makespan",
            function, timeline.name, rank, to_string(span.action), span.start.count(), span.end.count(),
            now.count());
      }
      now = span.end;
    }
  }
}

/// The shortest span longer than zero; zero if there is none.
Duration shortest_span(const Timeline& timeline) {
  Duration shortest = Duration::max();
  for (const auto& spans : timeline.spans) {
    for (const ActionSpan& span : spans) {
      if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    }
  }
  return shortest == Duration::max() ? Duration::zero() : shortest;
}

/// The stages of a rank's spans, in order.
std::vector<int> stages_of(const std::vector<ActionSpan>& spans) {
  std::vector<int> stages;
  for (const ActionSpan& span : spans) stages.push_back(span.action.stage);
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  return stages;
}

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

namespace {

constexpr double kMargin = 16;
constexpr double kLabels = 64;    ///< left of the grid: the ranks' names
constexpr double kFigures = 120;  ///< right of it: idle time and peak
constexpr double kLegend = 34;
constexpr double kTitle = 30;
constexpr double kCell = 26;
constexpr double kCurve = 20;
constexpr double kRow = kCell + kCurve + 14;
constexpr double kAxis = 40;
constexpr double kDigit = 6.4;  ///< the width of a digit in a cell

struct Kind {
  char letter;
  const char* name;
  std::array<int, 3> colour;
};

/// Colors that people with color vision deficiencies can distinguish (Okabe and Ito, 2008).
constexpr std::array<Kind, 4> kKinds = {{{'F', "forward", {86, 180, 233}},
                                         {'B', "backward", {230, 159, 0}},
                                         {'I', "input gradient", {204, 121, 167}},
                                         {'W', "weight gradient", {0, 158, 115}}}};

/// A length or a share without trailing zeros.
std::string number(double value, int digits = 1) {
  std::string text = fmt::format("{:.{}f}", value, digits);
  if (text.find('.') != std::string::npos) {
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
  }
  return text == "-0" ? "0" : text;
}

/// The time unit of a whole drawing.
struct Unit {
  const char* name;
  double nanoseconds;
  static Unit fit(Duration longest) {
    const auto count = static_cast<double>(longest.count());
    if (count >= 1e9) return {"s", 1e9};
    if (count >= 1e6) return {"ms", 1e6};
    if (count >= 1e3) return {"µs", 1e3};
    return {"ns", 1};
  }
  std::string of(Duration time) const { return value(static_cast<double>(time.count())) + " " + name; }
  std::string value(double count) const { return number(count / nanoseconds, 2); }
};

/// Draws timelines below each other, on one time scale and one memory scale.
class Picture {
 public:
  explicit Picture(const std::vector<Timeline>& timelines) : timelines_(timelines), longest_(longest()) {
    unit_ = Unit::fit(longest_);
    for (const Timeline& timeline : timelines_) {
      for (const double peak : timeline.peak_live) most_held_ = std::max(most_held_, peak);
      for (const auto& spans : timeline.spans) chunks_ = std::max(chunks_, stages_of(spans).size());
    }
    width_ = grid_width();
  }

  std::string draw() {
    add_legend();
    for (std::size_t at = 0; at < timelines_.size(); ++at) add_timeline(at);
    const double width = std::max(kMargin + kLabels + width_ + kFigures, legend_end_) + kMargin;
    std::string svg = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
        "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\">\n",
        number(width), number(y_ + 4));
    svg += style();
    svg += "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
    return svg + body_ + "</svg>\n";
  }

 private:
  Duration longest() const {
    Duration longest{1};
    for (const Timeline& timeline : timelines_) longest = std::max(longest, timeline.makespan);
    return longest;
  }

  /// Wide enough for the shortest action to hold its number, up to a limit.
  double grid_width() const {
    Duration shortest = longest_;
    int most = 0;
    for (const Timeline& timeline : timelines_) {
      const Duration here = shortest_span(timeline);
      if (here > Duration::zero()) shortest = std::min(shortest, here);
      for (const auto& spans : timeline.spans) {
        for (const ActionSpan& span : spans) most = std::max(most, span.action.micro_batch);
      }
    }
    const double cell = std::max(22.0, kDigit * static_cast<double>(std::to_string(most).size()) + 5);
    const double actions = static_cast<double>(longest_.count()) / static_cast<double>(shortest.count());
    return std::clamp(actions * cell, 620.0, 2600.0);
  }

  double x(Duration time) const {
    return kMargin + kLabels +
           width_ * static_cast<double>(time.count()) / static_cast<double>(longest_.count());
  }

  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(body_), format, std::forward<Args>(args)...);
    body_ += '\n';
  }

  /// A kind's color; later stages of a rank are lighter.
  std::string colour(const Kind& kind, std::size_t chunk) const {
    const double white =
        chunks_ > 1 ? 0.6 * static_cast<double>(chunk) / static_cast<double>(chunks_ - 1) : 0;
    std::string text = "#";
    for (const int part : kind.colour) {
      text += fmt::format("{:02x}", static_cast<int>(std::lround(part + white * (255 - part))));
    }
    return text;
  }

  std::string style() const {
    std::string rules;
    for (const Kind& kind : kKinds) {
      for (std::size_t chunk = 0; chunk < chunks_; ++chunk) {
        rules += fmt::format(".{}{}{{fill:{}}}", kind.letter, chunk, colour(kind, chunk));
      }
      rules += '\n';
    }
    return "<style>.t{stroke:#fff}.u{stroke:#fff;stroke-width:.3}text{fill:#222}.n{font-size:11px;text-"
           "anchor:middle}"
           ".h{font-size:15px;font-weight:bold}.s{fill:#666;font-size:11px}.m{fill:#d5d5d5;stroke:#555}"
           ".w{fill:#7fcbb5;stroke:#00694f}"
           ".a{stroke:#888}.e{stroke:#c00;stroke-dasharray:4 3}\n" +
           rules +
           "</style>\n<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
           "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#f4f4f4\"/>"
           "<line x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\" stroke=\"#bbb\" "
           "stroke-width=\"2\"/></pattern></defs>\n";
  }

  bool is_used(char kind) const {
    for (const Timeline& timeline : timelines_) {
      for (const auto& spans : timeline.spans) {
        for (const ActionSpan& span : spans) {
          if (letter(span.action.kind) == kind) return true;
        }
      }
    }
    return false;
  }

  void add_legend() {
    double at = kMargin + kLabels;
    const double top = kMargin;
    const auto say = [&](const std::string& text) {
      add("<text x=\"{}\" y=\"{}\">{}</text>", number(at), number(top + 12), text);
      at += 6.3 * static_cast<double>(text.size()) + 22;
    };
    for (const Kind& kind : kKinds) {
      if (!is_used(kind.letter)) continue;
      add("<rect class=\"{}0\" x=\"{}\" y=\"{}\" width=\"22\" height=\"16\"/>"
          "<text class=\"n\" x=\"{}\" y=\"{}\">{}</text>",
          kind.letter, number(at), number(top), number(at + 11), number(top + 12), kind.letter);
      at += 28;
      say(kind.name);
    }
    add("<rect x=\"{}\" y=\"{}\" width=\"22\" height=\"16\" fill=\"url(#idle)\"/>", number(at), number(top));
    at += 28;
    say("idle");
    add("<path class=\"m\" d=\"M{} {}h8v-7h7v-6h7v13z\"/>", number(at), number(top + 15));
    at += 28;
    say("activations held");
    if (is_used('W')) {
      add("<path class=\"w\" d=\"M{} {}h8v-7h7v-6h7v13z\"/>", number(at), number(top + 15));
      at += 28;
      say("of them, for weight gradients");
    }
    if (timelines_.size() > 1) {
      add("<line class=\"e\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/>", number(at + 11), number(top - 2),
          number(top + 18));
      at += 20;
      say("end of " + escape_xml(timelines_.front().name));
    }
    if (chunks_ > 1) {
      for (const std::size_t chunk : {std::size_t{0}, chunks_ - 1}) {
        add("<rect class=\"F{}\" x=\"{}\" y=\"{}\" width=\"14\" height=\"16\"/>", chunk, number(at),
            number(top));
        at += 14;
      }
      at += 6;
      say("lighter: later stage of the rank");
    }
    legend_end_ = at;
    y_ = kMargin + kLegend;
  }

  std::string title(std::size_t at) const {
    const Timeline& timeline = timelines_[at];
    std::string text = fmt::format("{}: {}, {} % idle", escape_xml(timeline.name),
                                   unit_.of(timeline.makespan), number(100 * idle_share(timeline)));
    const Duration plan = timelines_.front().makespan;
    if (at == 0 || plan == Duration::zero()) return text;
    const double longer =
        static_cast<double>(timeline.makespan.count()) / static_cast<double>(plan.count()) - 1;
    return text + fmt::format(", {} % {} than {}", number(100 * std::abs(longer)),
                              longer < 0 ? "shorter" : "longer", escape_xml(timelines_.front().name));
  }

  void add_timeline(std::size_t at) {
    const Timeline& timeline = timelines_[at];
    add("<text class=\"h\" x=\"{}\" y=\"{}\">{}</text>", number(kMargin + kLabels), number(y_ + 14),
        title(at));
    y_ += kTitle;
    const double top = y_;
    for (std::size_t rank = 0; rank < timeline.spans.size(); ++rank) {
      add_row(timeline, rank);
      y_ += kRow;
    }
    if (at > 0) {
      const std::string end = number(x(timelines_.front().makespan));
      add("<line class=\"e\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"><title>end of {3}</title></line>",
          end, number(top - 4), number(y_ - 4), escape_xml(timelines_.front().name));
    }
    add_axis(timeline.makespan);
    y_ += kAxis;
  }

  void add_row(const Timeline& timeline, std::size_t rank) {
    const double left = x(Duration::zero());
    const double right = x(timeline.makespan);
    add("<text x=\"{}\" y=\"{}\">rank {}</text>", number(kMargin), number(y_ + 18), rank);
    add("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"url(#idle)\"/>", number(left), number(y_),
        number(right - left), number(kCell));
    const std::vector<int> stages = stages_of(timeline.spans[rank]);
    for (const ActionSpan& span : timeline.spans[rank]) {
      const auto chunk = std::lower_bound(stages.begin(), stages.end(), span.action.stage) - stages.begin();
      add_cell(span, static_cast<std::size_t>(chunk));
    }
    add_curves(timeline, rank);
    const double figures = kMargin + kLabels + width_ + 10;
    add("<text class=\"s\" x=\"{}\" y=\"{}\">idle {}</text>", number(figures), number(y_ + 17),
        unit_.of(timeline.idle[rank]));
    add("<text class=\"s\" x=\"{}\" y=\"{}\">peak {}</text>", number(figures), number(y_ + kCell + 16),
        number(timeline.peak_live[rank], 2));
  }

  void add_cell(const ActionSpan& span, std::size_t chunk) {
    const double left = x(span.start), wide = x(span.end) - left;
    const std::string micro_batch = std::to_string(span.action.micro_batch);
    add("<rect class=\"{} {}{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"><title>{}: {} to "
        "{}</title></rect>",
        wide < 8 ? "u" : "t", letter(span.action.kind), chunk, number(left), number(y_), number(wide),
        number(kCell), to_string(span.action), unit_.of(span.start), unit_.of(span.end));
    if (wide < kDigit * static_cast<double>(micro_batch.size()) + 2) return;
    add("<text class=\"n\" x=\"{}\" y=\"{}\">{}</text>", number(left + wide / 2), number(y_ + 17),
        micro_batch);
  }

  /// Held memory rises when an action starts and falls when one ends; if both happen at the same time, the line
  /// stays. What weight gradients wait with, drawn over it, changes at the end of actions.
  void add_curves(const Timeline& timeline, std::size_t rank) {
    add_curve(timeline, rank, timeline.live[rank], "m");
    if (timeline.weight_inputs.empty()) return;
    const auto& waiting = timeline.weight_inputs[rank];
    if (std::any_of(waiting.begin(), waiting.end(), [](double held) { return held > 0; })) {
      add_curve(timeline, rank, waiting, "w");
    }
  }

  void add_curve(const Timeline& timeline, std::size_t rank, const std::vector<double>& live,
                 std::string_view style) {
    std::vector<std::pair<Duration, double>> steps = {{Duration::zero(), 0}};
    for (std::size_t at = 0; at < timeline.spans[rank].size(); ++at) {
      const double after = live[at];
      const ActionSpan& span = timeline.spans[rank][at];
      const Duration when = style == "m" && after > steps.back().second ? span.start : span.end;
      if (when == steps.back().first) steps.pop_back();
      if (steps.empty() || after != steps.back().second) steps.emplace_back(when, after);
    }
    const double base = y_ + kCell + kCurve + 2;
    std::string path = fmt::format("M{} {}", number(x(Duration::zero())), number(base));
    for (const auto& [when, held] : steps) {
      const double height = most_held_ > 0 ? kCurve * std::max(0.0, held) / most_held_ : 0;
      path += fmt::format("H{}V{}", number(x(when)), number(base - height));
    }
    path += fmt::format("H{}V{}z", number(x(timeline.makespan)), number(base));
    add("<path class=\"{}\" d=\"{}\"/>", style, path);
  }

  void add_axis(Duration makespan) {
    add("<line class=\"a\" x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\"/>", number(x(Duration::zero())),
        number(x(makespan)), number(y_));
    const double step = tick_step();
    const auto end = static_cast<double>(makespan.count());
    for (int tick = 0; tick * step <= end * (1 + 1e-9); ++tick) {
      const double at = kMargin + kLabels + width_ * tick * step / static_cast<double>(longest_.count());
      const bool last = (tick + 1) * step > end * (1 + 1e-9);
      add("<line class=\"a\" x1=\"{0}\" x2=\"{0}\" y1=\"{1}\" y2=\"{2}\"/><text class=\"n s\" x=\"{0}\" "
          "y=\"{3}\">{4}</text>",
          number(at), number(y_), number(y_ + 5), number(y_ + 18),
          unit_.value(tick * step) + (last ? std::string(" ") + unit_.name : ""));
    }
  }

  /// Nanoseconds between ticks: 1, 2 or 5 times a power of ten, 60 pixels apart at least.
  double tick_step() const {
    const double least = 60 / width_ * static_cast<double>(longest_.count());
    const double power = std::pow(10, std::floor(std::log10(least)));
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (factor * power >= least) return factor * power;
    }
    return 10 * power;
  }

  const std::vector<Timeline>& timelines_;
  const Duration longest_;
  Unit unit_{};
  double most_held_ = 0;
  std::size_t chunks_ = 1;  ///< the most stages of a rank
  double width_ = 0;        ///< of the grid
  double legend_end_ = 0;
  double y_ = 0;  ///< the top of the next element
  std::string body_;
};

}  // namespace

std::string draw_svg(const std::vector<Timeline>& timelines) {
  if (timelines.empty()) throw_invalid("draw_svg: there is no timeline to draw");
  for (const Timeline& timeline : timelines) check(timeline, "draw_svg");
  return Picture(timelines).draw();
}

}  // namespace torchspan::schedule
