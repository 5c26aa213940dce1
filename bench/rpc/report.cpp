#include "bench/rpc/report.h"

#include <algorithm>
#include <fmt/format.h>

namespace torchspan::bench {
namespace {

double percentile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

double median_of_rounds(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> medians;
  for (const auto& round : rounds) medians.push_back(percentile(round, 0.5));
  return percentile(medians, 0.5);
}

double high_end(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> all;
  for (const auto& round : rounds) all.insert(all.end(), round.begin(), round.end());
  return percentile(all, 0.99);
}

std::string amount(const nlohmann::json& metric, const char* key) {
  if (!metric.contains(key)) return "";
  const double value = metric.at(key).get<double>();
  if (metric.at("unit") == "percent") return fmt::format("{:.1f} %", value);
  if (value >= 10'000) return fmt::format("{:.2f} ms", value / 1000);
  return fmt::format("{:.{}f} us", value, value < 10 ? 2 : 1);
}

}  // namespace

void Report::add(const std::string& side, const Samples& round) {
  for (const auto& [name, samples] : round) {
    if (!samples.empty()) sides_[side][name].push_back(samples);
  }
}

const Report::Rounds* Report::find(const std::string& side, const std::string& name) const {
  const auto figures = sides_.find(side);
  if (figures == sides_.end()) return nullptr;
  const auto found = figures->second.find(name);
  return found == figures->second.end() ? nullptr : &found->second;
}

nlohmann::json Report::metrics() const {
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rpc_rows()) {
    const Rounds* ours = find(kOurs, row.name);
    if (ours == nullptr) continue;
    const double value = median_of_rounds(*ours);
    nlohmann::json metric{{"name", row.name}, {"unit", row.unit}, {"value", value}};
    if (row.unit == "us") metric["p99"] = high_end(*ours);
    if (const Rounds* peer = find(kPeer, row.name)) {
      const double theirs = median_of_rounds(*peer);
      metric["peer"] = kPeer;
      metric["peer_value"] = theirs;
      if (row.unit == "us") metric["peer_p99"] = high_end(*peer);
      if (theirs > 0) metric["ratio"] = value / theirs;
    }
    if (const Rounds* limit = find(kLimits, row.limit)) {
      metric["limit"] = row.limit;
      metric["limit_value"] = row.limit_times * median_of_rounds(*limit);
    }
    list.push_back(std::move(metric));
  }
  for (const Limit& limit : rpc_limits()) {
    if (const Rounds* rounds = find(kLimits, limit.name)) {
      list.push_back({{"name", limit.name},
                      {"unit", "us"},
                      {"value", median_of_rounds(*rounds)},
                      {"p99", high_end(*rounds)}});
    }
  }
  return list;
}

std::string table_of(const nlohmann::json& metrics) {
  std::string text = fmt::format("{:<26}{:>12}{:>12}{:>12}{:>8}{:>12}{:>8}  {}\n", "", "p50", "p99", "peer",
                                 "ratio", "limit", "share", "limit is");
  for (const auto& metric : metrics) {
    std::string ratio, share, limit;
    if (metric.contains("ratio")) ratio = fmt::format("{:.3f}", metric.at("ratio").get<double>());
    if (metric.contains("limit")) {
      limit = metric.at("limit");
      share =
          fmt::format("{:.2f}", metric.at("limit_value").get<double>() / metric.at("value").get<double>());
    }
    text += fmt::format("{:<26}{:>12}{:>12}{:>12}{:>8}{:>12}{:>8}  {}\n",
                        metric.at("name").get<std::string>(), amount(metric, "value"), amount(metric, "p99"),
                        amount(metric, "peer_value"), ratio, amount(metric, "limit_value"), share, limit);
  }
  return text + "ratio: TorchSpan's time divided by the peer's; share: fraction of the limit's speed\n";
}

}  // namespace torchspan::bench
