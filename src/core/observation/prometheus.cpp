#include "core/observation/prometheus.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace torchspan {
namespace {

/// The text with U+FFFD for bytes that are not UTF-8, for which Prometheus refuses all metrics of a worker.
std::string replace_invalid_utf8(std::string_view text) {
  using nlohmann::json;
  if (std::ranges::all_of(text, [](unsigned char c) { return c < 0x80; })) return std::string(text);
  return json::parse(json(std::string(text)).dump(-1, ' ', false, json::error_handler_t::replace))
      .get<std::string>();
}

std::string escape_label(std::string_view text) {
  std::string escaped;
  for (const char c : replace_invalid_utf8(text)) {
    if (c == '\\' || c == '"') escaped += '\\';
    if (c == '\n') {
      escaped += "\\n";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

}  // namespace

std::string metric_name(std::string_view counter) {
  std::string name = "torchspan_";
  for (const char c : counter) name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
}

void PrometheusText::family(std::string_view name, std::string_view type, std::string_view help) {
  family_ = name;
  text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

void PrometheusText::sample(std::string_view suffix, const Labels& labels, double value) {
  text_ += family_;
  text_ += suffix;
  char open = '{';
  for (const Labels* list : {&labels_, &labels}) {
    for (const auto& [name, text] : *list) {
      text_ += fmt::format("{}{}=\"{}\"", open, name, escape_label(text));
      open = ',';
    }
  }
  text_ += fmt::format("{}{}\n", open == ',' ? "} " : " ", number_text(value));
}

void CallHistograms::add(const StoredSpan& span, const std::string& name) {
  if (span.kind != SpanKind::kCall && span.kind != SpanKind::kHandler) return;
  constexpr std::size_t kMostFunctions = 200;
  Histograms& histograms = span.kind == SpanKind::kCall ? calls_ : handlers_;
  const bool known = histograms.contains(name) || histograms.size() < kMostFunctions;
  Histogram& histogram = histograms[known ? name : "(other)"];
  const double seconds = static_cast<double>(span.end - span.begin) / 1e9;
  std::size_t bucket = 0;
  while (bucket < kLimits.size() && seconds > kLimits[bucket]) ++bucket;
  ++histogram.counts[bucket];
  histogram.sum += seconds;
}

void CallHistograms::write_family(PrometheusText& out, const Histograms& histograms) {
  for (const auto& [name, histogram] : histograms) {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i <= kLimits.size(); ++i) {
      total += histogram.counts[i];
      const std::string limit = i < kLimits.size() ? fmt::format("{}", kLimits[i]) : "+Inf";
      out.sample("_bucket", {{"function", name}, {"le", limit}}, static_cast<double>(total));
    }
    out.sample("_sum", {{"function", name}}, histogram.sum);
    out.sample("_count", {{"function", name}}, static_cast<double>(total));
  }
}

void CallHistograms::write(PrometheusText& out) const {
  if (!calls_.empty()) {
    out.family("torchspan_rpc_client_call_duration_seconds", "histogram",
               "From a call to its result, at the caller.");
    write_family(out, calls_);
  }
  if (handlers_.empty()) return;
  out.family("torchspan_rpc_server_call_duration_seconds", "histogram", "Time of a call's handler.");
  write_family(out, handlers_);
}

}  // namespace torchspan
