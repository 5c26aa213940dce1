#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include <utility>

#include <torchspan/core/observation.h>
#include <torchspan/detail/core/spans.h>

#include "core/api/parse_number.h"
#include "core/api/timeout_notice.h"

namespace torchspan {
namespace {

constexpr std::string_view kPrefix = "torchspan-progress 1";
constexpr std::string_view kClearLine = "\r\x1b[2K";

std::string escape(std::string_view value) {
  std::string out;
  for (const unsigned char c : value) {
    if (c <= ' ' || c == '%' || c == 0x7f) {
      out += fmt::format("%{:02X}", c);
    } else {
      out += static_cast<char>(c);
    }
  }
  return out;
}

std::string unescape(std::string_view value) {
  std::string out;
  for (std::size_t i = 0; i < value.size(); ++i) {
    unsigned code = 0;
    if (value[i] == '%' && i + 2 < value.size() &&
        std::from_chars(value.data() + i + 1, value.data() + i + 3, code, 16).ptr == value.data() + i + 3) {
      out += static_cast<char>(code);
      i += 2;
    } else {
      out += value[i];
    }
  }
  return out;
}

template <class T>
bool read_number(std::string_view text, T& value) {
  const auto number = parse_number<T>(text);
  value = number.value_or(value);
  return number.has_value();
}

/// "17/469" or "17".
bool read_pair(std::string_view text, std::int64_t& done, std::int64_t& total) {
  const auto slash = text.find('/');
  if (slash == std::string_view::npos) return read_number(text, done);
  return read_number(text.substr(0, slash), done) && read_number(text.substr(slash + 1), total);
}

std::string write_pair(std::string_view key, std::int64_t done, std::int64_t total) {
  if (done == 0 && total == 0) return {};
  return total > 0 ? fmt::format(" {}={}/{}", key, done, total) : fmt::format(" {}={}", key, done);
}

bool read_field(std::string_view key, std::string_view value, ProgressReport& report) {
  if (key == "epoch") return read_pair(value, report.epoch, report.epochs);
  if (key == "step") return read_pair(value, report.step, report.steps);
  if (key == "rate") return read_number(value, report.rate);
  if (key == "loss") return read_number(value, report.loss.emplace());
  if (key == "left") return read_number(value, report.seconds_left.emplace());
  if (key == "unit") report.unit = unescape(value);
  if (key == "text") report.text = unescape(value);
  return true;
}

/// 5120 as "5,120", 51.25 as "51.2", 0.513 as "0.513".
std::string format_rate(double rate) {
  if (rate < 10) return fmt::format("{:.3g}", rate);
  if (rate < 100) return fmt::format("{:.1f}", rate);
  std::string digits = fmt::format("{:.0f}", rate);
  for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, ",");
  return digits;
}

/// Cuts after `width` characters of UTF-8, never inside one.
std::string cut(std::string text, std::size_t width) {
  std::size_t characters = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool starts = (static_cast<unsigned char>(text[i]) & 0xC0) != 0x80;
    if (starts && ++characters > width) {
      text.resize(i);
      break;
    }
  }
  return text;
}

/// Writes what the pipe takes at once and drops the rest, so that reporting progress never slows the
/// training.
void write_some(int descriptor, std::string_view text) {
  [[maybe_unused]] const auto written = write(descriptor, text.data(), text.size());
}

}  // namespace

std::optional<double> fraction_done(const ProgressReport& report) {
  if (report.steps > 0) {
    const double within =
        std::clamp(static_cast<double>(report.step) / static_cast<double>(report.steps), 0., 1.);
    if (report.epochs <= 0) return within;
    const auto before = static_cast<double>(std::max<std::int64_t>(report.epoch, 1) - 1);
    return std::clamp((before + within) / static_cast<double>(report.epochs), 0., 1.);
  }
  if (report.epochs > 0) {
    return std::clamp(static_cast<double>(report.epoch) / static_cast<double>(report.epochs), 0., 1.);
  }
  return std::nullopt;
}

std::string encode_progress(const ProgressReport& report) {
  // The line must fit into one write to a pipe: a part of it would spoil the next one, which may be a notice.
  const auto shorten = [](const std::string& text, std::size_t characters) {
    return escape(cut(text.substr(0, 4 * characters), characters));
  };
  std::string line(kPrefix);
  line += write_pair("epoch", report.epoch, report.epochs);
  line += write_pair("step", report.step, report.steps);
  if (report.loss) line += fmt::format(" loss={}", *report.loss);
  if (report.rate > 0) line += fmt::format(" rate={} unit={}", report.rate, shorten(report.unit, 20));
  if (report.seconds_left) line += fmt::format(" left={}", *report.seconds_left);
  if (!report.text.empty()) line += fmt::format(" text={}", shorten(report.text, 250));
  return line + "\n";
}

std::optional<ProgressReport> decode_progress(std::string_view line) {
  while (!line.empty() && (line.back() == '\n' || line.back() == '\r')) line.remove_suffix(1);
  if (!line.starts_with(kPrefix)) return std::nullopt;
  line.remove_prefix(kPrefix.size());
  if (!line.empty() && line.front() != ' ') return std::nullopt;
  ProgressReport report;
  while (!line.empty()) {
    const auto space = line.find(' ', 1);
    const auto field = line.substr(1, space == std::string_view::npos ? space : space - 1);
    line.remove_prefix(std::min(space, line.size()));
    const auto equals = field.find('=');
    if (equals == std::string_view::npos) return std::nullopt;
    if (!read_field(field.substr(0, equals), field.substr(equals + 1), report)) return std::nullopt;
  }
  return report;
}

std::string format_seconds(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
}

std::string format_progress(const ProgressReport& report, std::size_t width) {
  std::string line;
  const auto add = [&line](const std::string& part) {
    if (!line.empty() && !part.empty()) line += "  ";
    line += part;
  };
  const auto pair = [](std::string_view name, std::int64_t done, std::int64_t total) {
    return total > 0 ? fmt::format("{} {}/{}", name, done, total) : fmt::format("{} {}", name, done);
  };
  if (report.epoch != 0 || report.epochs != 0) add(pair("epoch", report.epoch, report.epochs));
  if (report.step != 0 || report.steps != 0) add(pair("step", report.step, report.steps));
  if (report.loss) add(fmt::format("loss {:.4f}", *report.loss));
  if (report.rate > 0) add(fmt::format("{} {}/s", format_rate(report.rate), report.unit));
  if (report.seconds_left) add(format_seconds(*report.seconds_left) + " left");
  add(report.text);
  std::replace_if(
      line.begin(), line.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  return cut(std::move(line), width);
}

ProgressOptions ProgressOptions::from_process() {
  ProgressOptions options;
  options.launcher_descriptor = launcher_pipe();
  const char* kind = std::getenv("TERM");
  options.terminal = isatty(options.descriptor) == 1 && (kind == nullptr || std::string_view(kind) != "dumb");
  winsize size{};
  if (options.terminal && ioctl(options.descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    options.width = size.ws_col;
  }
  return options;
}

Progress::Progress(Executor& executor, ProgressOptions options)
    : executor_(executor), options_(options), constructed_at_(executor.now()) {}

Progress::~Progress() { finish(); }

bool Progress::due() const {
  if (!shown_at_) return true;
  const bool live = options_.launcher_descriptor >= 0 || options_.terminal;
  return executor_.now() - *shown_at_ >= (live ? options_.draw_every : options_.print_every);
}

/// Steps of all epochs have different numbers, as long as the epochs have equally many.
void Progress::record_step(const ProgressReport& report, TimePoint now) {
  const auto before = std::exchange(reported_at_, now);
  if (!before || spans_ == nullptr || !spans_->is_traced()) return;
  const std::int64_t earlier =
      std::max<std::int64_t>(report.epoch - 1, 0) * std::max<std::int64_t>(report.steps, 0);
  spans_->record(SpanKind::kUser, "progress", *before,
                 static_cast<std::uint64_t>(std::max<std::int64_t>(earlier + report.step, 0)));
}

void Progress::report(ProgressReport report) {
  executor_.process().check();
  const TimePoint now = executor_.now();
  record_step(report, now);
  const double fraction = fraction_done(report).value_or(0);
  if (!began_at_) {
    began_at_ = now;
    began_fraction_ = fraction;
  } else if (!report.seconds_left && fraction > began_fraction_) {
    const double elapsed = to_seconds(now - *began_at_);
    report.seconds_left = elapsed * (1 - fraction) / (fraction - began_fraction_);
  }
  pending_ = std::move(report);
  if (due()) show(*std::exchange(pending_, std::nullopt));
}

void Progress::show(const ProgressReport& report) {
  shown_at_ = executor_.now();
  if (options_.launcher_descriptor >= 0) {
    write_some(options_.launcher_descriptor, encode_progress(report));
  } else if (options_.terminal) {
    write_some(options_.descriptor, std::string(kClearLine) +
                                        format_progress(report, options_.width > 1 ? options_.width - 1 : 1));
    line_open_ = true;
  } else {
    write_some(options_.descriptor, format_progress(report) + "\n");
  }
}

void Progress::finish() {
  if (!executor_.process().is_current()) return;  // the line is the parent's
  if (pending_) show(*std::exchange(pending_, std::nullopt));
  if (std::exchange(line_open_, false)) write_some(options_.descriptor, "\n");
}

}  // namespace torchspan
