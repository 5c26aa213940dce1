#include "launch/trace/chrome_json.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fmt/format.h>
#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "launch/trace/flows.h"
#include "launch/trace/tracks.h"

namespace torchspan::launch {
namespace {

constexpr int kNoThread = -1;

/// A JSON string; bytes that are not UTF-8 become replacement characters.
std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// Microseconds with three decimals: exact, which a double is not.
std::string microseconds(std::int64_t nanoseconds) {
  const auto size = static_cast<std::uint64_t>(std::llabs(nanoseconds));
  return fmt::format("{}{}.{:03}", nanoseconds < 0 ? "-" : "", size / 1000, size % 1000);
}

class ChromeJson {
 public:
  ChromeJson(const TraceSet& set, std::ostream& out, std::uint64_t most_spans) : set_(set), out_(out) {
    choose_spans(most_spans);
    for (const WorkerTrace& worker : set.workers) {
      threads_.emplace_back(worker.contents.spans.size(), kNoThread);
      names_.emplace_back();
      for (const std::string& name : worker.contents.names) names_.back().push_back(json_string(name));
    }
  }

  ChromeJsonReport write() {
    out_ << fmt::format(R"({{"displayTimeUnit":"ms","baseTimeNanoseconds":{},"traceEvents":[)",
                        set_.unix_base);
    for (std::size_t w = 0; w < set_.workers.size(); ++w) write_worker(w);
    write_flows();
    out_ << "\n],\"otherData\":{\"tool\":\"torchspan trace\",\"notes\":[";
    for (std::size_t i = 0; i < set_.notes.size(); ++i)
      out_ << (i == 0 ? "" : ",") << json_string(set_.notes[i]);
    out_ << "]}}\n";
    return report_;
  }

 private:
  /// Finds the duration below which spans are left out.
  void choose_spans(std::uint64_t most) {
    std::vector<std::int64_t> durations;
    for (const WorkerTrace& worker : set_.workers) {
      for (const StoredSpan& span : worker.contents.spans) durations.push_back(span.end - span.begin);
    }
    report_.spans = durations.size();
    if (durations.size() <= most) return;
    const auto last = durations.begin() + static_cast<std::ptrdiff_t>(most);
    std::nth_element(durations.begin(), last, durations.end(), std::greater<>());
    shortest_ = *last + 1;
    report_.shortest = shortest_;
    report_.spans = static_cast<std::uint64_t>(
        std::count_if(durations.begin(), durations.end(), [&](std::int64_t d) { return d >= shortest_; }));
    report_.left_out = durations.size() - report_.spans;
  }

  void event(const std::string& text) {
    out_ << (first_ ? "\n" : ",\n") << text;
    first_ = false;
  }

  void metadata(int rank, int thread, const char* name, const std::string& arguments) {
    event(fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{{}}}}})", rank, thread, name,
                      arguments));
  }

  void write_worker(std::size_t w) {
    const WorkerTrace& worker = set_.workers[w];
    const TraceIdentity& identity = worker.contents.identity;
    const int rank = identity.rank;
    metadata(rank, 0, "process_name",
             fmt::format(R"("name":{})", json_string(fmt::format("rank {} ({})", rank, identity.name))));
    metadata(rank, 0, "process_labels",
             fmt::format(R"("labels":{})",
                         json_string(fmt::format(
                             "{} pid {}{}", identity.host, identity.process,
                             worker.other_host ? fmt::format(", clock ±{:.0f} us", worker.clock_error / 1e3)
                                               : std::string()))));
    metadata(rank, 0, "process_sort_index", fmt::format(R"("sort_index":{})", rank));
    const Tracks tracks = make_tracks(worker.contents);
    for (std::size_t t = 0; t < tracks.tracks.size(); ++t)
      write_track(w, static_cast<int>(t) + 1, tracks.tracks[t]);
    for (const std::size_t span : tracks.without_track) write_async(w, span);
    write_curves(worker);
  }

  bool chosen(const StoredSpan& span) const { return span.end - span.begin >= shortest_; }

  void write_track(std::size_t w, int thread, const Track& track) {
    const WorkerTrace& worker = set_.workers[w];
    metadata(worker.rank(), thread, "thread_name", fmt::format(R"("name":{})", json_string(track.title)));
    metadata(worker.rank(), thread, "thread_sort_index", fmt::format(R"("sort_index":{})", track.order));
    for (const std::size_t index : track.spans) {
      const StoredSpan& span = worker.contents.spans[index];
      if (!chosen(span)) continue;
      threads_[w][index] = thread;
      event(
          fmt::format(R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"cat":"{}","name":{},"args":{{{}}}}})",
                      worker.rank(), thread, microseconds(span.begin), microseconds(span.end - span.begin),
                      kind_title(span.kind), names_[w][span.name], arguments_of(span)));
    }
  }

  void write_async(std::size_t w, std::size_t index) {
    const WorkerTrace& worker = set_.workers[w];
    const StoredSpan& span = worker.contents.spans[index];
    if (!chosen(span)) return;
    const std::uint64_t id = next_async_++;
    const auto end = [&](char phase, std::int64_t at) {
      event(
          fmt::format(R"({{"ph":"{}","pid":{},"tid":0,"ts":{},"cat":"{}","id":{},"name":{},"args":{{{}}}}})",
                      phase, worker.rank(), microseconds(at), kind_title(span.kind), id, names_[w][span.name],
                      phase == 'b' ? arguments_of(span) : std::string()));
    };
    end('b', span.begin);
    end('e', span.end);
  }

  static std::string arguments_of(const StoredSpan& span) {
    std::string text = fmt::format(R"("id":"{}")", span.link.id);
    if (span.link.peer >= 0) text += fmt::format(R"(,"peer rank":{})", span.link.peer);
    if (span.link.part >= 0) text += fmt::format(R"(,"part":{})", span.link.part);
    if (span.link.bytes > 0) text += fmt::format(R"(,"bytes":{})", span.link.bytes);
    return text;
  }

  void write_curves(const WorkerTrace& worker) {
    const auto point = [&](std::int64_t at, const std::string& name, const std::string& value) {
      event(fmt::format(R"({{"ph":"C","pid":{},"ts":{},"name":{},"args":{{"value":{}}}}})", worker.rank(),
                        microseconds(at), json_string(name), value));
    };
    for (const Scalar& scalar : worker.contents.scalars) {
      if (!std::isfinite(scalar.value)) continue;
      point(scalar.at.time_since_epoch().count(), scalar.tag, fmt::format("{}", scalar.value));
    }
    for (const CounterSample& sample : worker.contents.counters) {
      for (const auto& [name, value] : sample.values) point(sample.at, name, fmt::format("{}", value));
    }
  }

  /// An arrow end inside a span; false if the span is not drawn or has no inside.
  bool has_inside(const SpanPlace& place) const {
    const StoredSpan& span = span_of(place);
    return threads_[place.worker][place.span] != kNoThread && span.end > span.begin;
  }
  const StoredSpan& span_of(const SpanPlace& place) const {
    return set_.workers[place.worker].contents.spans[place.span];
  }
  void arrow_end(char phase, const SpanPlace& place, std::int64_t at, std::uint64_t id) {
    event(fmt::format(R"({{"ph":"{}","pid":{},"tid":{},"ts":{},"cat":"flow","name":"flow","id":{}{}}})",
                      phase, set_.workers[place.worker].rank(), threads_[place.worker][place.span],
                      microseconds(at), id, phase == 'f' ? R"(,"bp":"e")" : ""));
  }

  /// Requests and replies have different arrows: a second start with one id would be dropped.
  void write_flows() {
    std::uint64_t id = 1;
    for (const Flow& flow : find_flows(set_)) {
      if (!has_inside(flow.from) || !has_inside(flow.to)) continue;
      const StoredSpan& from = span_of(flow.from);
      const StoredSpan& to = span_of(flow.to);
      arrow_end('s', flow.from, from.begin, id);
      arrow_end('f', flow.to, to.begin, id++);
      ++report_.arrows;
      if (!flow.returns) continue;
      arrow_end('s', flow.to, to.end - 1, id);
      arrow_end('f', flow.from, from.end - 1, id++);
      ++report_.arrows;
    }
  }

  const TraceSet& set_;
  std::ostream& out_;
  std::vector<std::vector<int>> threads_;        ///< by worker and span
  std::vector<std::vector<std::string>> names_;  ///< by worker and name, as JSON
  ChromeJsonReport report_;
  std::int64_t shortest_ = 0;
  std::uint64_t next_async_ = 1;
  bool first_ = true;
};

}  // namespace

ChromeJsonReport write_chrome_json(const TraceSet& set, std::ostream& out, std::uint64_t most_spans) {
  return ChromeJson(set, out, most_spans).write();
}

}  // namespace torchspan::launch
