#include "launch/trace/chrome_json.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <ostream>
#include <vector>

#include "launch/trace/flows.h"
#include "launch/trace/json_events.h"
#include "launch/trace/profile_json.h"
#include "launch/trace/tracks.h"

namespace torchspan::launch {
namespace {

constexpr int kNoThread = -1;

class ChromeJson {
 public:
  ChromeJson(const TraceSet& set, std::ostream& out, std::uint64_t most_spans)
      : set_(set), out_(out), events_(out) {
    choose_spans(most_spans);
    for (const WorkerTrace& worker : set.workers) {
      threads_.emplace_back(worker.contents.spans.size(), kNoThread);
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
    report_.arrows = events_.arrows();
    return report_;
  }

 private:
  /// Finds the duration below which spans and events are left out.
  void choose_spans(std::uint64_t most) {
    std::vector<std::int64_t> durations;
    for (const WorkerTrace& worker : set_.workers) {
      for (const StoredSpan& span : worker.contents.spans) durations.push_back(span.end - span.begin);
      for (const ProfilerTrace& profile : worker.profiles) {
        for (const ProfilerEvent& event : profile.events) durations.push_back(event.end - event.begin);
      }
    }
    if (durations.size() <= most) return;
    const auto last = durations.begin() + static_cast<std::ptrdiff_t>(most);
    std::nth_element(durations.begin(), last, durations.end(), std::greater<>());
    shortest_ = report_.shortest = *last + 1;
    report_.left_out = static_cast<std::uint64_t>(
        std::count_if(durations.begin(), durations.end(), [&](std::int64_t d) { return d < shortest_; }));
  }

  void write_worker(std::size_t w) {
    const WorkerTrace& worker = set_.workers[w];
    const TraceIdentity& identity = worker.contents.identity;
    const int rank = identity.rank;
    events_.add_metadata(
        rank, 0, "process_name",
        fmt::format(R"("name":{})", json_string(fmt::format("rank {} ({})", rank, identity.name))));
    events_.add_metadata(
        rank, 0, "process_labels",
        fmt::format(R"("labels":{})",
                    json_string(fmt::format("{} pid {}{}", identity.host, identity.process,
                                            worker.other_host
                                                ? fmt::format(", clock ±{:.0f} us", worker.clock_error / 1e3)
                                                : std::string()))));
    events_.add_metadata(rank, 0, "process_sort_index", fmt::format(R"("sort_index":{})", rank));
    const Tracks tracks = make_tracks(worker.contents);
    for (std::size_t t = 0; t < tracks.tracks.size(); ++t)
      write_track(w, static_cast<int>(t) + 1, tracks.tracks[t]);
    for (const std::size_t index : tracks.without_track) {
      const StoredSpan& span = worker.contents.spans[index];
      if (!chosen(span)) continue;
      events_.add_overlapping(rank, span.begin, span.end, std::string(kind_title(span.kind)),
                              worker.name_of(span), arguments_of(span));
      ++report_.spans;
    }
    write_curves(worker);
    std::size_t rows = tracks.tracks.size() + 1;
    for (const ProfilerTrace& profile : worker.profiles) {
      report_.profiler_events += write_profile(profile, {rank, static_cast<int>(rows), shortest_}, events_);
      rows += profile.rows.size();
    }
  }

  bool chosen(const StoredSpan& span) const { return span.end - span.begin >= shortest_; }

  void write_track(std::size_t w, int thread, const Track& track) {
    const WorkerTrace& worker = set_.workers[w];
    const int rank = worker.rank();
    events_.add_metadata(rank, thread, "thread_name", fmt::format(R"("name":{})", json_string(track.title)));
    events_.add_metadata(rank, thread, "thread_sort_index", fmt::format(R"("sort_index":{})", track.order));
    for (const std::size_t index : track.spans) {
      const StoredSpan& span = worker.contents.spans[index];
      if (!chosen(span)) continue;
      threads_[w][index] = thread;
      events_.add_slice(rank, thread, span.begin, span.end, std::string(kind_title(span.kind)),
                        worker.name_of(span), arguments_of(span));
      ++report_.spans;
    }
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
      events_.add(fmt::format(R"({{"ph":"C","pid":{},"ts":{},"name":{},"args":{{"value":{}}}}})",
                              worker.rank(), json_microseconds(at), json_string(name), value));
    };
    for (const Scalar& scalar : worker.contents.scalars) {
      if (!std::isfinite(scalar.value)) continue;
      point(scalar.at.time_since_epoch().count(), scalar.tag, fmt::format("{}", scalar.value));
    }
    for (const CounterSample& sample : worker.contents.counters) {
      for (const auto& [name, value] : sample.values) point(sample.at, name, fmt::format("{}", value));
    }
  }

  /// An arrow ends inside a span; false if the span is not drawn or has no inside.
  bool has_inside(const SpanPlace& place) const {
    const StoredSpan& span = span_of(place);
    return thread_of(place) != kNoThread && span.end > span.begin;
  }
  const StoredSpan& span_of(const SpanPlace& place) const {
    return set_.workers[place.worker].contents.spans[place.span];
  }
  int thread_of(const SpanPlace& place) const { return threads_[place.worker][place.span]; }
  int rank_of(const SpanPlace& place) const { return set_.workers[place.worker].rank(); }

  /// A result may leave before its span ends: the next one then begins earlier, and an arrow does not go back in time.
  std::int64_t leaves(const Flow& flow) const {
    const StoredSpan& from = span_of(flow.from);
    return flow.from_end ? std::clamp(span_of(flow.to).begin, from.begin, from.end - 1) : from.begin;
  }

  void write_flows() {
    for (const Flow& flow : find_flows(set_)) {
      if (!has_inside(flow.from) || !has_inside(flow.to)) continue;
      const StoredSpan& from = span_of(flow.from);
      const StoredSpan& to = span_of(flow.to);
      events_.begin_arrow(rank_of(flow.from), thread_of(flow.from), leaves(flow));
      events_.end_arrow(rank_of(flow.to), thread_of(flow.to), flow.to_end ? to.end - 1 : to.begin);
      if (!flow.returns) continue;
      events_.begin_arrow(rank_of(flow.to), thread_of(flow.to), to.end - 1);
      events_.end_arrow(rank_of(flow.from), thread_of(flow.from), from.end - 1);
    }
  }

  const TraceSet& set_;
  std::ostream& out_;
  JsonEvents events_;
  std::vector<std::vector<int>> threads_;  ///< by worker and span
  ChromeJsonReport report_;
  std::int64_t shortest_ = 0;
};

}  // namespace

ChromeJsonReport write_chrome_json(const TraceSet& set, std::ostream& out, std::uint64_t most_spans) {
  return ChromeJson(set, out, most_spans).write();
}

}  // namespace torchspan::launch
