#include "bench/autograd/report.h"

#include <algorithm>
#include <fmt/format.h>

#include "bench/harness.h"

namespace torchspan::bench {
namespace {

/// A goal of 0 means no goal.
struct Goal {
  const char* name;
  double ratio;
};
constexpr Goal kEngine[] = {
    {"chain_1000", 0.8}, {"fan_500", 1.05}, {"resnet_block", 1.05}, {"transformer_block", 1.05}};
constexpr Goal kPasses[] = {{"hop_1", 0.2}, {"hop_8", 0.2}, {"backward_1", 0}, {"backward_8", 0},
                            {"chain_4", 0}, {"ps_4x3", 0},  {"ps_4x3_step", 0}};
constexpr Goal kModes[] = {{"hop_1", 1.3},      {"hop_8", 1.3},   {"backward_1", 1.3},
                           {"backward_8", 1.3}, {"chain_4", 1.3}, {"ps_4x3", 1.3}};
struct Size {
  const char* name;
  double bytes;
};
constexpr Size kSizes[] = {{"64B", 64}, {"64KiB", 64 << 10}, {"16MiB", 16 << 20}};
constexpr const char* kPython[] = {"context",         "call", "local_1", "local_8", "hop_1_caller_cpu",
                                   "hop_8_caller_cpu"};

/// The median; for an even number of values, the mean of the two in the middle.
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
}

/// The median of a figure's rounds.
double middle(const std::map<int, double>& rounds) {
  std::vector<double> values;
  for (const auto& [round, value] : rounds) values.push_back(value);
  return median(values);
}

std::string amount(const nlohmann::json& metric, const char* key) {
  if (!metric.contains(key)) return "";
  const double value = metric.at(key).get<double>();
  if (metric.at("unit") == "ratio") return fmt::format("{:.3f}", value);
  if (metric.at("unit") == "bytes") return fmt::format("{:.0f} B", value);
  return value >= 10'000 ? fmt::format("{:.2f} ms", value / 1000) : fmt::format("{:.1f} us", value);
}

std::string ratio(const nlohmann::json& metric, const char* key) {
  return metric.contains(key) ? fmt::format("{:.3f}", metric.at(key).get<double>()) : "";
}

}  // namespace

void Report::add(int round, const Samples& figures) {
  for (const auto& [name, samples] : figures) {
    if (!samples.empty()) rounds_[name][round] = samples;
  }
}

std::map<int, double> Report::medians(const std::string& figure) const {
  std::map<int, double> list;
  const auto found = rounds_.find(figure);
  if (found == rounds_.end()) return list;
  for (const auto& [round, samples] : found->second) list[round] = median(samples);
  return list;
}

std::vector<double> Report::all(const std::string& figure) const {
  std::vector<double> samples;
  for (const auto& [round, some] : rounds_.at(figure))
    samples.insert(samples.end(), some.begin(), some.end());
  return samples;
}

nlohmann::json Report::row(const std::string& name, const std::string& figure,
                           const std::string& unit) const {
  return {{"name", name},
          {"unit", unit},
          {"value", middle(medians(figure))},
          {"p10", percentile(all(figure), 0.1)},
          {"p99", percentile(all(figure), 0.99)}};
}

/// A round in which one of the two has no samples has no ratio.
void Report::hold_against(nlohmann::json& metric, const std::string& figure, const std::string& peer,
                          double goal) const {
  const auto mine = medians(figure), theirs = medians(peer);
  std::vector<double> ratios;
  for (const auto& [round, value] : mine) {
    if (const auto found = theirs.find(round); found != theirs.end()) ratios.push_back(value / found->second);
  }
  if (ratios.empty()) return;
  metric["peer_value"] = middle(theirs);
  metric["ratio"] = median(ratios);
  metric["ratios"] = ratios;
  metric["ratio_p10"] = percentile(all(figure), 0.1) / percentile(all(peer), 0.1);
  if (goal == 0) return;
  metric["goal"] = goal;
  metric["met"] = median(ratios) <= goal;
}

std::string Report::quickest_peer(const std::string& figure) const {
  std::string best;
  for (const std::string peer : kPeers) {
    if (!has(peer + "/" + figure)) continue;
    if (best.empty() || middle(medians(peer + "/" + figure)) < middle(medians(best + "/" + figure)))
      best = peer;
  }
  return best;
}

void Report::add_engine(nlohmann::json& list) const {
  for (const Goal& goal : kEngine) {
    const std::string figure = std::string("engine/") + goal.name;
    if (!has(figure)) continue;
    auto metric = row("autograd/" + figure, figure, "us");
    metric["peer"] = "libtorch";
    hold_against(metric, figure, figure + "/libtorch", goal.ratio);
    list.push_back(std::move(metric));
  }
}

/// Metrics of SMART, the default mode, have no suffix.
void Report::add_passes(nlohmann::json& list) const {
  for (const Goal& goal : kPasses) {
    for (const bool fast : {false, true}) {
      const std::string name = goal.name, figure = name + (fast ? "/fast" : "/smart");
      if (!has(figure)) continue;
      auto metric = row("autograd/" + name + (fast ? "/fast" : ""), figure, "us");
      if (const std::string peer = quickest_peer(name); !peer.empty()) {
        metric["peer"] = peer;
        hold_against(metric, figure, peer + "/" + name, goal.ratio);
        const auto cpu = medians(peer + "/python/" + name + "_caller_cpu");
        if (metric.contains("peer_value") && !cpu.empty()) {
          const double rest = metric["peer_value"].get<double>() - middle(cpu);
          if (rest > 0) metric["ratio_without_caller_cpu"] = metric["value"].get<double>() / rest;
        }
      }
      list.push_back(std::move(metric));
    }
  }
}

void Report::add_modes(nlohmann::json& list) const {
  for (const Goal& goal : kModes) {
    const std::string smart = std::string(goal.name) + "/smart", fast = std::string(goal.name) + "/fast";
    if (!has(smart) || !has(fast)) continue;
    nlohmann::json metric{{"name", std::string("autograd/smart_over_fast/") + goal.name}, {"unit", "ratio"}};
    nlohmann::json against{};
    hold_against(against, smart, fast, goal.ratio);
    metric["value"] = against["ratio"];
    for (const char* key : {"ratios", "ratio_p10", "goal", "met"}) {
      if (against.contains(key)) metric[key] = against[key];
    }
    list.push_back(std::move(metric));
  }
}

void Report::add_wire(nlohmann::json& list) const {
  for (const Size& size : kSizes) {
    for (const bool fast : {false, true}) {
      const std::string figure = std::string("wire/") + size.name + (fast ? "/fast" : "/smart");
      if (!has(figure)) continue;
      auto metric = row(std::string("autograd/wire/") + size.name + (fast ? "/fast" : ""), figure, "bytes");
      metric["limit"] = "gradients";
      metric["limit_value"] = 2 * size.bytes;
      list.push_back(std::move(metric));
    }
  }
}

void Report::add_peers(nlohmann::json& list) const {
  for (const std::string peer : kPeers) {
    for (const Goal& goal : kPasses) {
      const std::string figure = peer + "/" + goal.name;
      if (has(figure)) list.push_back(row(figure, figure, "us"));
    }
    for (const char* name : kPython) {
      const std::string figure = peer + "/python/" + name;
      if (has(figure)) list.push_back(row(figure, figure, "us"));
    }
  }
}

nlohmann::json Report::metrics() const {
  nlohmann::json list = nlohmann::json::array();
  add_engine(list);
  add_passes(list);
  add_modes(list);
  add_wire(list);
  add_peers(list);
  return list;
}

std::string table_of(const nlohmann::json& metrics) {
  std::string text = fmt::format("{:<44}{:>12}{:>12}{:>12}{:>8}{:>8}{:>7}  {}\n", "", "p50", "p99", "peer",
                                 "ratio", "at p10", "goal", "");
  for (const auto& metric : metrics) {
    std::string note;
    if (metric.contains("peer") && metric.at("peer") == kPeers[1]) note = "TCP  ";
    if (metric.contains("met")) note += metric.at("met").get<bool>() ? "met" : "MISSED";
    if (metric.contains("ratio_without_caller_cpu"))
      note += fmt::format("  ({} of the peer less its calling thread's CPU)",
                          ratio(metric, "ratio_without_caller_cpu"));
    if (metric.contains("limit_value")) {
      const double least = metric.at("limit_value").get<double>();
      note += fmt::format("{} of gradients, {:.0f} more", amount(metric, "limit_value"),
                          metric.at("value").get<double>() - least);
    }
    text += fmt::format("{:<44}{:>12}{:>12}{:>12}{:>8}{:>8}{:>7}  {}\n", metric.at("name").get<std::string>(),
                        amount(metric, "value"), amount(metric, "p99"), amount(metric, "peer_value"),
                        ratio(metric, "ratio"), ratio(metric, "ratio_p10"),
                        metric.contains("goal") ? fmt::format("{:.2f}", metric.at("goal").get<double>()) : "",
                        note);
  }
  return text +
         "ratio: TorchSpan's time divided by the peer's, computed in each round; at p10: the same for the "
         "10th "
         "percentiles of all samples;\n"
         "SMART unless the name says fast; ps_4x3: elapsed time divided by the steps of all three trainers\n";
}

}  // namespace torchspan::bench
