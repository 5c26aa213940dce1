#include "launch/trace/clock_fit.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::launch {
namespace {

constexpr double kMostDrift = 1e-3;
constexpr std::size_t kWindows = 16;

struct ClockPoint {
  std::int64_t at;  ///< reference time
  double offset;
  double bound;  ///< half of the delay
};

std::int64_t count_of(TimePoint time) { return time.time_since_epoch().count(); }

/// The usable samples, by time. Differences are taken before halves, so that no precision is lost.
std::vector<ClockPoint> points_of(const std::vector<ClockSample>& samples) {
  constexpr std::int64_t kMost = std::int64_t{1} << 61;
  std::vector<ClockPoint> points;
  for (const ClockSample& sample : samples) {
    const std::int64_t sent = count_of(sample.sent), arrived = count_of(sample.arrived);
    const std::int64_t received = count_of(sample.received), answered = count_of(sample.answered);
    const bool sane = std::max({sent, arrived, received, answered}) < kMost &&
                      std::min({sent, arrived, received, answered}) > -kMost;
    if (!sane || arrived < sent || answered < received || answered - received > arrived - sent) continue;
    const double upper = static_cast<double>(received - sent);     // the request took no time
    const double lower = static_cast<double>(answered - arrived);  // the reply took no time
    points.push_back({sent + (arrived - sent) / 2, (upper + lower) / 2, (upper - lower) / 2});
  }
  std::sort(points.begin(), points.end(),
            [](const ClockPoint& a, const ClockPoint& b) { return a.at < b.at; });
  return points;
}

/// The fastest sample of each window of equal length.
std::vector<ClockPoint> fastest(const std::vector<ClockPoint>& points) {
  const std::int64_t first = points.front().at;
  const auto length =
      std::max<std::int64_t>((points.back().at - first) / static_cast<std::int64_t>(kWindows) + 1, 1);
  std::vector<ClockPoint> best;
  std::int64_t window = -1;
  for (const ClockPoint& point : points) {
    const std::int64_t at = (point.at - first) / length;
    if (at != window) {
      best.push_back(point);
    } else if (point.bound < best.back().bound) {
      best.back() = point;
    }
    window = at;
  }
  return best;
}

/// Least squares around the middle; the drift of one point, or of points too close for it, is 0.
void fit(const std::vector<ClockPoint>& points, ClockLine& line) {
  const double count = static_cast<double>(points.size());
  double mean_time = 0, mean_offset = 0;
  for (const ClockPoint& point : points) {
    mean_time += static_cast<double>(point.at - line.origin) / count;
    mean_offset += (point.offset - points.front().offset) / count;
  }
  double covariance = 0, variance = 0;
  for (const ClockPoint& point : points) {
    const double time = static_cast<double>(point.at - line.origin) - mean_time;
    covariance += time * (point.offset - points.front().offset - mean_offset);
    variance += time * time;
  }
  line.drift = variance > 0 ? std::clamp(covariance / variance, -kMostDrift, kMostDrift) : 0;
  line.offset = points.front().offset + mean_offset - line.drift * mean_time;
}

}  // namespace

std::int64_t ClockLine::to_reference(std::int64_t time) const {
  // The offset, which may be years, is removed in integers; the rest is small enough for a double.
  const auto whole = static_cast<std::int64_t>(std::llround(offset));
  const std::int64_t since = time - whole - origin;
  const double drifted =
      static_cast<double>(since) * (drift / (1 + drift)) + (offset - static_cast<double>(whole));
  return origin + since - static_cast<std::int64_t>(std::llround(drifted));
}

double ClockLine::error_at(std::int64_t time) const {
  const std::int64_t outside = std::max<std::int64_t>({first - time, time - last, 0});
  return error + error_rate * static_cast<double>(outside);
}

ClockLine fit_clock(const std::vector<ClockSample>& samples) {
  const std::vector<ClockPoint> all = points_of(samples);
  if (all.empty()) throw_invalid("there is no usable clock sample");
  const std::vector<ClockPoint> points = fastest(all);
  ClockLine line;
  line.origin = line.first = points.front().at;
  line.last = points.back().at;
  fit(points, line);
  const auto residual = [&](const ClockPoint& point) {
    return std::abs(point.offset - line.offset - line.drift * static_cast<double>(point.at - line.origin));
  };
  for (const ClockPoint& point : points) line.error = std::max(line.error, point.bound + residual(point));
  // The true line is within the bound at both ends, which limits how fast the two lines part beyond them.
  const auto length = static_cast<double>(line.last - line.first);
  line.error_rate = length > 0 ? std::min(2 * line.error / length, 2 * kMostDrift) : kMostDrift;
  return line;
}

}  // namespace torchspan::launch
