#include "launch/trace/chrome_json.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fmt/format.h>
#include <functional>
#include <iosfwd>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch/report/figures.h"
#include "launch/trace/profiler_file.h"
#include "launch/trace/trace_set.h"
#include "launch/trace/tracks.h"

namespace torchspan::launch {
namespace {

/// Writes the events of Chrome's JSON format one after another. The process of an event is a rank.
class JsonEvents {
 public:
  explicit JsonEvents(std::ostream& out) : out_(out) {}

  void add(const std::string& event);
  void add_metadata(int rank, int thread, const char* name, const std::string& arguments);
  /// `arguments` are the members of an object.
  void add_slice(int rank, int thread, std::int64_t begin, std::int64_t end, const std::string& category,
                 const std::string& name, const std::string& arguments);
  /// The same as a pair of asynchronous events, which may overlap others.
  void add_overlapping(int rank, std::int64_t begin, std::int64_t end, const std::string& category,
                       const std::string& name, const std::string& arguments);
  /// Ends of an arrow, each inside a slice of its row. Every arrow has another id.
  void begin_arrow(int rank, int thread, std::int64_t at);
  void end_arrow(int rank, int thread, std::int64_t at);
  std::uint64_t arrows() const { return arrows_; }

 private:
  void add_arrow_end(const char* phase, int rank, int thread, std::int64_t at, const char* more);

  std::ostream& out_;
  bool first_ = true;
  std::uint64_t overlapping_ = 0;
  std::uint64_t arrows_ = 0;
};

/// Quotes a text; bytes that are not UTF-8 become replacement characters.
std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

/// Microseconds with three decimals: exact, which a double is not.
std::string json_microseconds(std::int64_t nanoseconds) {
  const auto size = static_cast<std::uint64_t>(std::llabs(nanoseconds));
  return fmt::format("{}{}.{:03}", nanoseconds < 0 ? "-" : "", size / 1000, size % 1000);
}

void JsonEvents::add(const std::string& event) {
  out_ << (first_ ? "\n" : ",\n") << event;
  first_ = false;
}

void JsonEvents::add_metadata(int rank, int thread, const char* name, const std::string& arguments) {
  add(fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{{}}}}})", rank, thread, name,
                  arguments));
}

void JsonEvents::add_slice(int rank, int thread, std::int64_t begin, std::int64_t end,
                           const std::string& category, const std::string& name,
                           const std::string& arguments) {
  add(fmt::format(R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"cat":{},"name":{},"args":{{{}}}}})", rank,
                  thread, json_microseconds(begin), json_microseconds(end - begin), json_string(category),
                  json_string(name), arguments));
}

void JsonEvents::add_overlapping(int rank, std::int64_t begin, std::int64_t end, const std::string& category,
                                 const std::string& name, const std::string& arguments) {
  const std::string head = fmt::format(R"("pid":{},"tid":0,"cat":{},"id":{},"name":{})", rank,
                                       json_string(category), ++overlapping_, json_string(name));
  add(fmt::format(R"({{"ph":"b",{},"ts":{},"args":{{{}}}}})", head, json_microseconds(begin), arguments));
  add(fmt::format(R"({{"ph":"e",{},"ts":{},"args":{{}}}})", head, json_microseconds(end)));
}

/// Requests and replies have different arrows: a second beginning with one id would be dropped.
void JsonEvents::begin_arrow(int rank, int thread, std::int64_t at) {
  ++arrows_;
  add_arrow_end("s", rank, thread, at, "");
}

void JsonEvents::end_arrow(int rank, int thread, std::int64_t at) {
  add_arrow_end("f", rank, thread, at, R"(,"bp":"e")");
}

void JsonEvents::add_arrow_end(const char* phase, int rank, int thread, std::int64_t at, const char* more) {
  add(fmt::format(R"({{"ph":"{}","pid":{},"tid":{},"ts":{},"cat":"flow","name":"flow","id":{}{}}})", phase,
                  rank, thread, json_microseconds(at), arrows_, more));
}

/// The events of one row of a profile.
struct ProfilerRow {
  std::vector<std::size_t>
      nested;  ///< indices, by beginning, longer ones first; each is inside, or apart from, others
  std::vector<std::size_t> overlapping;  ///< those that overlap a nested one in part
};

/// Distributes the events of a profile to its rows.
std::vector<ProfilerRow> make_profiler_rows(const ProfilerTrace& profile) {
  const std::vector<ProfilerEvent>& events = profile.events;
  std::vector<std::size_t> order(events.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return events[a].begin != events[b].begin ? events[a].begin < events[b].begin
                                              : events[a].end > events[b].end;
  });
  std::vector<ProfilerRow> rows(profile.rows.size());
  std::vector<std::vector<std::int64_t>> open(profile.rows.size());  // ends of the enclosing events
  for (const std::size_t i : order) {
    const ProfilerEvent& event = events[i];
    std::vector<std::int64_t>& enclosing = open[event.row];
    while (!enclosing.empty() && enclosing.back() <= event.begin) enclosing.pop_back();
    if (!enclosing.empty() && event.end > enclosing.back()) {
      rows[event.row].overlapping.push_back(i);
      continue;
    }
    enclosing.push_back(event.end);
    rows[event.row].nested.push_back(i);
  }
  return rows;
}

/// Where the events of a profile are written.
struct ProfilePlace {
  int rank = 0;
  int first_thread = 0;       ///< number of the profile's first row
  std::int64_t shortest = 0;  ///< leaves out shorter events
};

/// After the rows of threads and steps, before those of calls.
constexpr int kProfilerOrder = -400;

class ProfileJson {
 public:
  ProfileJson(const ProfilerTrace& profile, const ProfilePlace& place, JsonEvents& out)
      : profile_(profile), place_(place), out_(out) {}

  std::uint64_t write() {
    const std::vector<ProfilerRow> rows = make_profiler_rows(profile_);
    for (std::size_t row = 0; row < rows.size(); ++row) {
      if (!rows[row].nested.empty()) write_row(row, rows[row]);
      for (const std::size_t i : rows[row].overlapping) write_overlapping(profile_.events[i]);
    }
    for (const ProfilerArrow& arrow : profile_.arrows) {
      if (!begins_.contains(key_of(arrow.from)) || !begins_.contains(key_of(arrow.to))) continue;
      out_.begin_arrow(place_.rank, thread_of(arrow.from.row), arrow.from.at);
      out_.end_arrow(place_.rank, thread_of(arrow.to.row), arrow.to.at);
    }
    return written_;
  }

 private:
  using Key = std::pair<std::uint32_t, std::int64_t>;  ///< row, time
  static Key key_of(const ProfilerArrow::End& end) { return {end.row, end.at}; }
  int thread_of(std::size_t row) const { return place_.first_thread + static_cast<int>(row); }
  bool chosen(const ProfilerEvent& event) const { return event.end - event.begin >= place_.shortest; }

  void write_row(std::size_t row, const ProfilerRow& events) {
    const int thread = thread_of(row);
    out_.add_metadata(place_.rank, thread, "thread_name",
                      fmt::format(R"("name":{})", json_string(profile_.rows[row])));
    out_.add_metadata(place_.rank, thread, "thread_sort_index",
                      fmt::format(R"("sort_index":{})", kProfilerOrder + static_cast<int>(row % 400)));
    for (const std::size_t i : events.nested) {
      const ProfilerEvent& event = profile_.events[i];
      if (!chosen(event)) continue;
      out_.add_slice(place_.rank, thread, event.begin, event.end, profile_.categories[event.category],
                     profile_.names[event.name], event.arguments);
      if (event.end > event.begin) begins_.insert({event.row, event.begin});
      ++written_;
    }
  }

  void write_overlapping(const ProfilerEvent& event) {
    if (!chosen(event)) return;
    out_.add_overlapping(place_.rank, event.begin, event.end, profile_.categories[event.category],
                         profile_.names[event.name], event.arguments);
    ++written_;
  }

  const ProfilerTrace& profile_;
  const ProfilePlace place_;
  JsonEvents& out_;
  std::set<Key> begins_;  ///< of the slices that were written: arrows end there
  std::uint64_t written_ = 0;
};

/// Writes a profile as rows of a rank's process. Returns the number of events written.
std::uint64_t write_profile(const ProfilerTrace& profile, const ProfilePlace& place, JsonEvents& out) {
  return ProfileJson(profile, place, out).write();
}

/// One span of one worker.
struct SpanPlace {
  std::size_t worker = 0;  ///< index into TraceSet::workers
  std::size_t span = 0;
};

/// A call and the handler that served it, gradients that one worker sent and another received, two actions of a pipeline
/// that follow each other, or the rank that starts a reduction last and one that waits for it.
struct Flow {
  SpanPlace from;
  SpanPlace to;
  bool returns = false;  ///< the first worker waits for the end of the second's span
  bool from_end =
      false;  ///< it leaves when the second span begins or the first ends, not at the beginning of the first
  bool to_end = false;  ///< it arrives at the end of the second span, not its beginning
};

/// Caller, callee and call id; or sender, receiver, pass id and what was sent.
using FlowKey = std::tuple<int, int, std::uint64_t, std::string>;

struct FlowEnds {
  std::vector<SpanPlace> from, to;
};

constexpr std::string_view kSends = "send gradients: ";
constexpr std::string_view kReceives = "receive gradients: ";

/// The rest of `name` after `prefix`.
bool split(const std::string& name, std::string_view prefix, std::string& rest) {
  if (!name.starts_with(prefix)) return false;
  rest = name.substr(prefix.size());
  return true;
}

const StoredSpan& span_at(const TraceSet& set, const SpanPlace& place) {
  return set.workers[place.worker].contents.spans[place.span];
}

/// Actions of a pipeline's step by micro-batch, stage and direction; of those of replicas nothing says which follow each
/// other.
void add_pipeline_flows(const TraceSet& set, std::vector<Flow>& flows) {
  using Key = std::tuple<std::uint64_t, int, int, bool>;  // step, micro-batch, stage, whether it is a forward
  std::map<Key, std::vector<SpanPlace>> actions;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const std::vector<StoredSpan>& spans = set.workers[w].contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      if (spans[i].kind != SpanKind::kPipeline) continue;
      const auto action = parse_action(set.workers[w].name_of(spans[i]));
      if (!action || action->kind == schedule::ActionKind::kWeightGradient) continue;
      actions[{spans[i].link.id, action->micro_batch, action->stage,
               action->kind == schedule::ActionKind::kForward}]
          .push_back({w, i});
    }
  }
  for (const auto& [key, places] : actions) {
    const auto& [step, micro_batch, stage, forward] = key;
    const auto next = actions.find({step, micro_batch, stage + (forward ? 1 : -1), forward});
    if (places.size() != 1 || next == actions.end() || next->second.size() != 1) continue;
    if (places[0].worker == next->second[0].worker) continue;
    flows.push_back({.from = places[0], .to = next->second[0], .from_end = true});
  }
}

/// Buckets and other operations of a group: the others end when the rank that starts last has its data.
void add_group_flows(const TraceSet& set, std::vector<Flow>& flows) {
  using Key = std::tuple<SpanKind, int, std::uint64_t, std::string>;  // kind, bucket or group, number, name
  std::map<Key, std::vector<SpanPlace>> operations;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const std::vector<StoredSpan>& spans = set.workers[w].contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const bool of_group = spans[i].kind == SpanKind::kBucket || spans[i].kind == SpanKind::kCollective;
      if (!of_group || spans[i].link.part < 0) continue;
      operations[{spans[i].kind, spans[i].link.part, spans[i].link.id, set.workers[w].name_of(spans[i])}]
          .push_back({w, i});
    }
  }
  for (const auto& [key, places] : operations) {
    const auto same_worker = [](const SpanPlace& a, const SpanPlace& b) { return a.worker == b.worker; };
    if (std::ranges::adjacent_find(places, same_worker) != places.end()) continue;  // in the order of workers
    const SpanPlace last = *std::ranges::max_element(
        places, {}, [&](const SpanPlace& place) { return span_at(set, place).begin; });
    for (const SpanPlace& place : places) {
      const bool waited = place.worker != last.worker && span_at(set, place).end > span_at(set, last).begin;
      if (waited) flows.push_back({.from = last, .to = place, .to_end = true});
    }
  }
}

/// Finds the related spans of different workers. Ambiguous ones, such as calls of a rank that was replaced, are left
/// out.
std::vector<Flow> find_flows(const TraceSet& set) {
  std::map<FlowKey, FlowEnds> calls, gradients;
  for (std::size_t w = 0; w < set.workers.size(); ++w) {
    const WorkerTrace& worker = set.workers[w];
    const std::vector<StoredSpan>& spans = worker.contents.spans;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const StoredSpan& span = spans[i];
      const int peer = span.link.peer;
      if (peer < 0) continue;
      std::string what;
      if (span.kind == SpanKind::kCall) {
        calls[{worker.rank(), peer, span.link.id, ""}].from.push_back({w, i});
      } else if (span.kind == SpanKind::kHandler) {
        calls[{peer, worker.rank(), span.link.id, ""}].to.push_back({w, i});
      } else if (span.kind == SpanKind::kAutograd && split(worker.name_of(span), kSends, what)) {
        gradients[{worker.rank(), peer, span.link.id, what}].from.push_back({w, i});
      } else if (span.kind == SpanKind::kAutograd && split(worker.name_of(span), kReceives, what)) {
        gradients[{peer, worker.rank(), span.link.id, what}].to.push_back({w, i});
      }
    }
  }
  std::vector<Flow> flows;
  for (const auto& [key, ends] : calls) {
    if (ends.from.size() == 1 && ends.to.size() == 1) flows.push_back({ends.from[0], ends.to[0], true});
  }
  for (const auto& [key, ends] : gradients) {
    if (ends.from.size() != ends.to.size()) continue;
    for (std::size_t i = 0; i < ends.from.size(); ++i) flows.push_back({ends.from[i], ends.to[i], false});
  }
  add_pipeline_flows(set, flows);
  add_group_flows(set, flows);
  return flows;
}

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
