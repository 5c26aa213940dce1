#include "launch/report/report_page.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "launch/trace/tracks.h"
#include "launch/version.h"

namespace torchspan::launch {
namespace {

using nlohmann::json;

json encode_workers(const TraceSet& set) {
  json workers = json::array();
  for (const WorkerTrace& worker : set.workers) {
    const TraceContents& contents = worker.contents;
    workers.push_back({{"name", contents.identity.name},
                       {"rank", worker.rank()},
                       {"host", contents.identity.host},
                       {"process", contents.identity.process},
                       {"spans", contents.spans.size()},
                       {"lost", contents.lost},
                       {"complete", contents.complete},
                       {"otherHost", worker.other_host},
                       {"clockError", worker.clock_error}});
  }
  return workers;
}

/// The duration from which on spans are shown.
std::int64_t shortest_shown(const TraceSet& set, std::size_t most) {
  std::vector<std::int64_t> durations;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) durations.push_back(span.end - span.begin);
  }
  if (durations.size() <= most) return 0;
  const auto last = durations.begin() + static_cast<std::ptrdiff_t>(most);
  std::nth_element(durations.begin(), last, durations.end(), std::greater<>());
  return *last + 1;
}

json encode_track(const TraceContents& contents, const Track& track, std::int64_t shortest) {
  json begins = json::array(), lengths = json::array(), names = json::array(), kinds = json::array();
  json ids = json::array(), peers = json::array(), bytes = json::array();
  std::int64_t previous = 0;
  for (const std::size_t index : track.spans) {
    const StoredSpan& span = contents.spans[index];
    if (span.end - span.begin < shortest) continue;
    begins.push_back(span.begin - previous);
    previous = span.begin;
    lengths.push_back(span.end - span.begin);
    names.push_back(span.name);
    kinds.push_back(static_cast<int>(span.kind));
    ids.push_back(std::to_string(span.link.id));
    peers.push_back(span.link.peer);
    bytes.push_back(span.link.bytes);
  }
  return {{"title", track.title}, {"begins", begins}, {"lengths", lengths}, {"names", names},
          {"kinds", kinds},       {"ids", ids},       {"peers", peers},     {"bytes", bytes}};
}

json encode_timeline(const TraceSet& set, std::size_t most) {
  const std::int64_t shortest = shortest_shown(set, most);
  json workers = json::array();
  for (const WorkerTrace& worker : set.workers) {
    Tracks tracks = make_tracks(worker.contents, 12);
    std::stable_sort(tracks.tracks.begin(), tracks.tracks.end(),
                     [](const Track& a, const Track& b) { return a.order < b.order; });
    json rows = json::array();
    for (const Track& track : tracks.tracks) {
      json row = encode_track(worker.contents, track, shortest);
      if (!row["begins"].empty()) rows.push_back(std::move(row));
    }
    workers.push_back(
        {{"names", worker.contents.names}, {"tracks", rows}, {"withoutRow", tracks.without_track.size()}});
  }
  return {{"workers", workers}, {"shortest", shortest}};
}

json encode_steps(const TrainingSteps& steps) {
  json numbers = json::array(), begins = json::array(), lengths = json::array();
  for (const TrainingStep& step : steps.steps) {
    numbers.push_back(step.number);
    json own_begins = json::array(), own_lengths = json::array();
    for (const Interval& part : step.by_worker) {
      own_begins.push_back(part.begin);
      own_lengths.push_back(part.length());
    }
    begins.push_back(own_begins);
    lengths.push_back(own_lengths);
  }
  return {{"source", steps.source}, {"numbers", numbers}, {"begins", begins}, {"lengths", lengths}};
}

json encode_reductions(const Reductions& reductions) {
  json workers = json::array(), buckets = json::array();
  for (const ReductionTimes& times : reductions.workers) {
    workers.push_back({{"rank", times.rank},
                       {"rounds", times.rounds},
                       {"whole", times.whole},
                       {"forward", times.forward},
                       {"backward", times.backward},
                       {"latePeer", times.late_peer},
                       {"transfer", times.transfer},
                       {"other", times.other()}});
  }
  for (const auto& [number, figures] : reductions.buckets) {
    json last = json::array();
    for (const auto& [rank, rounds] : figures.last) last.push_back({rank, rounds});
    buckets.push_back({{"number", number},
                       {"bytes", figures.bytes},
                       {"rounds", figures.rounds},
                       {"duration", figures.duration},
                       {"skew", figures.skew},
                       {"hidden", figures.hidden},
                       {"last", last}});
  }
  return {{"workers", workers}, {"buckets", buckets}};
}

json encode_calls(const Calls& calls) {
  json functions = json::array(), traffic = json::array();
  for (const FunctionFigures& figures : calls.functions) {
    functions.push_back({{"name", figures.name},
                         {"calls", figures.calls},
                         {"served", figures.served},
                         {"p50", figures.p50},
                         {"p99", figures.p99},
                         {"longest", figures.longest},
                         {"servedP50", figures.served_p50},
                         {"servedP99", figures.served_p99},
                         {"total", figures.total}});
  }
  for (const auto& [ranks, figures] : calls.traffic) {
    traffic.push_back({ranks.first, ranks.second, figures.bytes, figures.messages});
  }
  return {{"functions", functions}, {"traffic", traffic}};
}

json encode_modules(const std::vector<ModuleFigures>& modules) {
  json encoded = json::array();
  const auto times = [](const ModuleTimes& of) { return json::array({of.count, of.p50, of.total}); };
  for (const ModuleFigures& module : modules) {
    encoded.push_back(
        {{"name", module.name}, {"forward", times(module.forward)}, {"backward", times(module.backward)}});
  }
  return encoded;
}

json encode_grid(const schedule::Timeline& timeline) {
  json rows = json::array();
  for (const auto& spans : timeline.spans) {
    json row = json::array();
    for (const schedule::ActionSpan& span : spans) {
      row.push_back({schedule::to_string(span.action), span.start.count(), (span.end - span.start).count(),
                     static_cast<int>(span.action.kind), span.action.micro_batch});
    }
    rows.push_back(row);
  }
  return {{"rows", rows}, {"length", timeline.makespan.count()}, {"idle", schedule::idle_share(timeline)}};
}

json encode_pipeline(const std::optional<PipelineFigures>& pipeline) {
  if (!pipeline) return nullptr;
  return {{"steps", pipeline->steps},
          {"left_out", pipeline->left_out},
          {"idle", pipeline->idle},
          {"shown", std::to_string(pipeline->shown)},
          {"ranks", pipeline->ranks},
          {"measured", encode_grid(pipeline->measured)},
          {"simulated", pipeline->simulated ? encode_grid(*pipeline->simulated) : json(nullptr)}};
}

/// Curves: of each tag and worker, [time, step, value].
json encode_curves(const TraceSet& set) {
  std::map<std::pair<std::string, int>, json> curves;
  for (const WorkerTrace& worker : set.workers) {
    for (const Scalar& scalar : worker.contents.scalars) {
      if (!std::isfinite(scalar.value)) continue;
      curves[{scalar.tag, worker.rank()}].push_back(
          {scalar.at.time_since_epoch().count(), scalar.step, scalar.value});
    }
  }
  json list = json::array();
  for (const auto& [key, points] : curves) {
    list.push_back({{"tag", key.first}, {"rank", key.second}, {"points", points}});
  }
  return list;
}

json encode_memory(const TraceSet& set) {
  json list = json::array();
  for (const WorkerTrace& worker : set.workers) {
    json points = json::array();
    for (const CounterSample& sample : worker.contents.counters) {
      const auto found = sample.values.find("process.resident_bytes");
      if (found != sample.values.end()) points.push_back({sample.at, found->second});
    }
    list.push_back({{"rank", worker.rank()}, {"points", points}});
  }
  return list;
}

json encode_comparison(const RunComparison* comparison) {
  if (comparison == nullptr) return nullptr;
  json figures = json::array();
  for (const ComparedFigure& figure : comparison->figures) {
    figures.push_back({{"name", figure.name},
                       {"before", figure.text(figure.before)},
                       {"after", figure.text(figure.after)},
                       {"change", figure.change()},
                       {"clear", figure.is_clear ? json(*figure.is_clear) : json(nullptr)}});
  }
  return {{"run", comparison->run}, {"figures", figures}, {"notes", comparison->notes}};
}

}  // namespace

std::string encode_report(const TraceSet& set, const RunFigures& figures, std::size_t most_spans,
                          const RunComparison* comparison) {
  json findings = json::array();
  for (const RunFinding& finding : judge_run(set, figures)) {
    findings.push_back({{"share", finding.share}, {"text", finding.text}, {"advice", finding.advice}});
  }
  const json report = {{"run", set.workers.front().contents.identity.run},
                       {"began", set.unix_base / 1'000'000},
                       {"length", set.length},
                       {"notes", set.notes},
                       {"workers", encode_workers(set)},
                       {"findings", findings},
                       {"comparison", encode_comparison(comparison)},
                       {"timeline", encode_timeline(set, most_spans)},
                       {"steps", encode_steps(figures.steps)},
                       {"reductions", encode_reductions(figures.reductions)},
                       {"calls", encode_calls(figures.calls)},
                       {"modules", encode_modules(figures.modules)},
                       {"pipeline", encode_pipeline(figures.pipeline)},
                       {"curves", encode_curves(set)},
                       {"memory", encode_memory(set)}};
  std::string text = report.dump(-1, ' ', true, json::error_handler_t::replace);
  // Only strings contain '<': the parser of HTML must not see one, nor the script's parser another value.
  for (std::size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at)) {
    text.replace(at, 1, "\\u003c");
  }
  return text;
}

namespace {

/// 128 random bits: text in the trace cannot contain the nonce that lets a script run.
std::string random_nonce() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

}  // namespace

std::string make_report_page(std::string_view data) {
  const ReportAssets assets = report_assets();
  const std::string nonce = random_nonce();
  const std::string torchspan_version = version();
  const std::map<std::string_view, std::string_view> values = {{"NONCE", nonce},
                                                               {"STYLE", assets.style},
                                                               {"SCRIPT", assets.script},
                                                               {"DATA", data},
                                                               {"VERSION", torchspan_version}};
  // Values are not searched for further marks.
  std::string page;
  std::string_view rest = assets.page;
  while (!rest.empty()) {
    const auto mark = rest.find('@');
    page += rest.substr(0, mark);
    if (mark == std::string_view::npos) break;
    rest.remove_prefix(mark + 1);
    const auto end = rest.find('@');
    page += values.at(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  return page;
}

}  // namespace torchspan::launch
