#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchspan/detail/core/spans.h>

namespace torchspan {

/// Writes metrics in Prometheus' text format, version 0.0.4.
class PrometheusText {
 public:
  using Labels = std::vector<std::pair<std::string_view, std::string_view>>;
  /// `labels` are added to every sample.
  explicit PrometheusText(Labels labels) : labels_(std::move(labels)) {}

  /// Starts a family. All of its samples follow.
  void family(std::string_view name, std::string_view type, std::string_view help);
  /// `suffix` is appended to the family's name.
  void sample(std::string_view suffix, const Labels& labels, double value);
  const std::string& text() const { return text_; }

 private:
  const Labels labels_;
  std::string family_;
  std::string text_;
};

/// "rpc.bytes_sent" as "torchspan_rpc_bytes_sent".
std::string metric_name(std::string_view counter);

/// Durations of calls and handlers, by function. The first 200 functions are counted separately.
class CallHistograms {
 public:
  void add(const StoredSpan& span, const std::string& name);
  void write(PrometheusText& out) const;

 private:
  /// Upper limits of the buckets in seconds; a last bucket has none.
  static constexpr std::array kLimits = {1e-5, 4e-5, 16e-5, 64e-5, 25e-4, 1e-2,
                                         4e-2, 0.16, 0.64,  2.5,   10.0,  60.0};
  struct Histogram {
    std::array<std::uint64_t, kLimits.size() + 1> counts{};
    double sum = 0;
  };
  using Histograms = std::map<std::string, Histogram>;

  static void write_family(PrometheusText& out, const Histograms& histograms);

  Histograms calls_, handlers_;
};

}  // namespace torchspan
