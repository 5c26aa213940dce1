#include "core/observation/worker_metrics.h"

#include <set>

#include "core/observation/process_figures.h"

namespace torchspan {

void WorkerMetrics::collect() {
  std::vector<StoredSpan> spans;
  runtime_.spans.read(spans_, spans);
  for (std::string& name : runtime_.spans.names_from(names_.size())) names_.push_back(std::move(name));
  for (const StoredSpan& span : spans) calls_.add(span, names_.at(span.name));
  constexpr std::size_t kMostTags = 1000;
  for (const Scalar& scalar : runtime_.scalars.read(next_scalar_, lost_scalars_)) {
    if (scalars_.contains(scalar.tag) || scalars_.size() < kMostTags) scalars_[scalar.tag] = scalar.value;
  }
}

std::string WorkerMetrics::text() {
  collect();
  const std::string rank = std::to_string(identity_.rank);
  PrometheusText out({{"rank", rank}, {"worker", identity_.name}});
  const std::set<std::string> gauges = runtime_.metrics.gauges();
  for (const auto& [name, value] : runtime_.metrics.snapshot()) {
    const bool gauge = gauges.contains(name);
    out.family(metric_name(name) + (gauge ? "" : "_total"), gauge ? "gauge" : "counter",
               "Counter " + name + ".");
    out.sample("", {}, static_cast<double>(value));
  }
  calls_.write(out);
  if (!scalars_.empty()) {
    out.family("torchspan_scalar", "gauge", "Last value that the program logged for a tag.");
    for (const auto& [tag, value] : scalars_) out.sample("", {{"tag", tag}}, value);
  }
  out.family("torchspan_spans_total", "counter", "Spans recorded, including lost ones.");
  out.sample("", {}, static_cast<double>(runtime_.spans.recorded()));
  out.family("torchspan_spans_lost_total", "counter", "Spans that these metrics do not include.");
  out.sample("", {}, static_cast<double>(spans_.lost));
  out.family("torchspan_process_resident_memory_bytes", "gauge", "Resident memory of the process.");
  out.sample("", {}, static_cast<double>(resident_bytes()));
  out.family("torchspan_process_cpu_seconds_total", "counter", "Processor time of the process.");
  out.sample("", {}, processor_seconds());
  return out.text();
}

}  // namespace torchspan
