#include "launch/trace/trace_set.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <map>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "launch/display/board.h"
#include "launch/trace/module_spans.h"

namespace torchspan::launch {
namespace {

/// What a file contains now; its worker may still append to it.
Bytes read_bytes(const std::filesystem::path& path) {
  std::error_code failure;
  const std::uintmax_t size = std::filesystem::file_size(path, failure);
  if (failure) throw_invalid("it cannot be read: {}", failure.message());
  std::ifstream file(path, std::ios::binary);
  Bytes bytes(static_cast<std::size_t>(size));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file.is_open() || file.bad()) throw_invalid("it cannot be read: {}", std::strerror(errno));
  bytes.resize(static_cast<std::size_t>(file.gcount()));
  return bytes;
}

/// "worker1 (rank 1, node3)".
std::string describe_trace(const TraceIdentity& worker) {
  return fmt::format("{} (rank {}, {})", worker.name, worker.rank, worker.host);
}

/// When a trace ends, as nanoseconds since 1970.
std::int64_t unix_end(const TraceContents& trace) {
  std::int64_t last = trace.identity.began;
  for (const StoredSpan& span : trace.spans) last = std::max(last, span.end);
  for (const CounterSample& sample : trace.counters) last = std::max(last, sample.at);
  return trace.identity.unix_began + (last - trace.identity.began);
}

/// Removes the traces that ended before all others of the last run began. Not every launcher gives each run its own id.
void remove_earlier_runs(std::vector<TraceContents>& traces) {
  constexpr std::int64_t kStartDifference = 1'000'000'000;   // of workers that recorded nothing
  constexpr std::int64_t kClockDifference = 60'000'000'000;  // of hosts
  std::sort(traces.begin(), traces.end(),
            [](const auto& a, const auto& b) { return a.identity.unix_began < b.identity.unix_began; });
  const bool one_clock = std::all_of(traces.begin(), traces.end(), [&](const auto& trace) {
    return trace.identity.clock == traces.front().identity.clock;
  });
  std::size_t first = 0;
  std::int64_t end = unix_end(traces.front());
  for (std::size_t i = 1; i < traces.size(); ++i) {
    if (traces[i].identity.unix_began > end + (one_clock ? kStartDifference : kClockDifference)) first = i;
    end = std::max(end, unix_end(traces[i]));
  }
  traces.erase(traces.begin(), traces.begin() + static_cast<std::ptrdiff_t>(first));
}

/// Keeps the traces of the run and the attempt that began last.
void keep_last_run(std::vector<TraceContents>& traces, std::vector<std::string>& notes) {
  const auto last = std::max_element(traces.begin(), traces.end(), [](const auto& a, const auto& b) {
    return a.identity.unix_began < b.identity.unix_began;
  });
  const TraceIdentity identity = last->identity;
  const auto other = [&](const TraceContents& trace) {
    return trace.identity.run != identity.run || trace.identity.attempt != identity.attempt;
  };
  const std::size_t all = traces.size();
  std::erase_if(traces, other);
  remove_earlier_runs(traces);
  if (const std::size_t removed = all - traces.size(); removed > 0) {
    notes.push_back(fmt::format("{} trace{} of earlier runs or attempts {} left out", removed,
                                removed == 1 ? "" : "s", removed == 1 ? "is" : "are"));
  }
}

/// Keeps the last process of every rank; `traces` are sorted by rank and beginning.
void keep_last_processes(std::vector<TraceContents>& traces, std::vector<std::string>& notes) {
  for (std::size_t i = 1; i < traces.size(); ++i) {
    if (traces[i].identity.rank != traces[i - 1].identity.rank) continue;
    notes.push_back(fmt::format("{} replaced process {}, whose trace is left out",
                                describe_trace(traces[i].identity), traces[i - 1].identity.process));
    traces.erase(traces.begin() + static_cast<std::ptrdiff_t>(--i));
  }
}

void note_missing_ranks(const std::vector<TraceContents>& traces, std::vector<std::string>& notes) {
  constexpr int kMostRanks = 1 << 20;  // more are not believed
  const int size = traces.front().identity.world_size;
  std::vector<int> missing;
  auto trace = traces.begin();
  for (int rank = 0; rank < std::min(size, kMostRanks); ++rank) {
    while (trace != traces.end() && trace->identity.rank < rank) ++trace;
    if (trace == traces.end() || trace->identity.rank != rank) missing.push_back(rank);
  }
  if (missing.empty()) return;
  notes.push_back(fmt::format("no trace of rank{} {} (of {}): copy the files of all hosts into one folder",
                              missing.size() == 1 ? "" : "s", format_ranks(missing), size));
}

void note_losses(const TraceContents& trace, std::vector<std::string>& notes) {
  const std::string who = describe_trace(trace.identity);
  if (trace.lost > 0) {
    notes.push_back(
        fmt::format("{} lost {} of {} spans: figures of its functions are too low; raise "
                    "TORCHSPAN_TRACE_SPANS if the run is long",
                    who, trace.lost, trace.lost + trace.spans.size()));
  }
  if (!trace.complete) {
    notes.push_back(
        fmt::format("{} did not end its trace: it was killed or still runs; up to its last 20 ms "
                    "are missing",
                    who));
  }
  if (trace.ignored > 0) {
    notes.push_back(fmt::format("the last {} bytes of the trace of {} are unreadable", trace.ignored, who));
  }
}

/// Returns the line of every clock against the reference's.
std::map<std::string, ClockLine> fit_clocks(const std::vector<TraceContents>& traces) {
  const std::string& reference = traces.front().identity.clock;
  std::map<int, std::string> clocks;
  for (const TraceContents& trace : traces) clocks[trace.identity.rank] = trace.identity.clock;
  std::map<std::string, std::vector<ClockSample>> samples;
  for (const TraceContents& trace : traces) {
    if (trace.identity.clock != reference) continue;
    for (const ClockSample& sample : trace.clock_samples) {
      const auto found = clocks.find(sample.rank);
      if (found != clocks.end()) samples[found->second].push_back(sample);
    }
  }
  std::map<std::string, ClockLine> lines{{reference, ClockLine{}}};
  for (const TraceContents& trace : traces) {
    if (lines.contains(trace.identity.clock)) continue;
    try {
      lines[trace.identity.clock] = fit_clock(samples[trace.identity.clock]);
    } catch (const Error& error) {
      throw_invalid(
          "the clock of {} cannot be compared with that of {}: {}; workers of several hosts compare clocks "
          "through rank 0, so its trace must be in the folder, and the run must last longer than a second",
          describe_trace(trace.identity), describe_trace(traces.front().identity), error.message());
    }
  }
  return lines;
}

/// Moves all times of a trace to the reference clock.
WorkerTrace convert(TraceContents contents, const ClockLine& line, bool other_host) {
  WorkerTrace worker{std::move(contents), 0, other_host, line, {}};
  if (!other_host) return worker;
  const auto time = [&](TimePoint at) {
    return TimePoint(Duration(line.to_reference(at.time_since_epoch().count())));
  };
  for (StoredSpan& span : worker.contents.spans) {
    span.begin = line.to_reference(span.begin);
    span.end = line.to_reference(span.end);
    worker.clock_error = std::max({worker.clock_error, line.error_at(span.begin), line.error_at(span.end)});
  }
  for (Scalar& scalar : worker.contents.scalars) scalar.at = time(scalar.at);
  for (CounterSample& sample : worker.contents.counters) sample.at = line.to_reference(sample.at);
  return worker;
}

/// Makes all times relative to the first span's.
void rebase(TraceSet& set) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = 0;
  for (const WorkerTrace& worker : set.workers) {
    for (const StoredSpan& span : worker.contents.spans) {
      first = std::min(first, span.begin);
      last = std::max(last, span.end);
    }
  }
  const TraceIdentity& reference = set.workers.front().contents.identity;
  set.unix_base = reference.unix_began - reference.began;
  move_base(set, first == std::numeric_limits<std::int64_t>::max() ? reference.began : first);
  set.length = std::max<std::int64_t>(last - set.base, 0);
}

}  // namespace

void move_base(TraceSet& set, std::int64_t by) {
  set.base += by;
  set.unix_base += by;
  set.length -= by;
  for (WorkerTrace& worker : set.workers) {
    for (StoredSpan& span : worker.contents.spans) {
      span.begin -= by;
      span.end -= by;
    }
    for (Scalar& scalar : worker.contents.scalars) scalar.at -= Duration(by);
    for (CounterSample& sample : worker.contents.counters) sample.at -= by;
    for (ProfilerTrace& profile : worker.profiles) {
      for (ProfilerEvent& event : profile.events) {
        event.begin -= by;
        event.end -= by;
      }
      for (ProfilerArrow& arrow : profile.arrows) {
        arrow.from.at -= by;
        arrow.to.at -= by;
      }
    }
  }
}

TraceSet align_traces(std::vector<TraceContents> traces) {
  if (traces.empty()) throw_invalid("there is no trace");
  TraceSet set;
  keep_last_run(traces, set.notes);
  std::stable_sort(traces.begin(), traces.end(), [](const auto& a, const auto& b) {
    return std::pair(a.identity.rank, a.identity.unix_began) <
           std::pair(b.identity.rank, b.identity.unix_began);
  });
  keep_last_processes(traces, set.notes);
  note_missing_ranks(traces, set.notes);
  const std::map<std::string, ClockLine> lines = fit_clocks(traces);
  const std::string reference = traces.front().identity.clock;
  for (TraceContents& trace : traces) {
    note_losses(trace, set.notes);
    make_module_spans(trace);
    const std::string clock = trace.identity.clock;
    set.workers.push_back(convert(std::move(trace), lines.at(clock), clock != reference));
  }
  rebase(set);
  return set;
}

namespace {

/// Aligns the traces. Names a file that is left out if that fails, because it may be the cause.
TraceSet align_usable(std::vector<TraceContents> traces, const std::vector<std::string>& unusable) {
  try {
    return align_traces(std::move(traces));
  } catch (const Error& error) {
    if (unusable.empty()) throw;
    const std::string more = unusable.size() == 1 ? ""
                                                  : fmt::format(" ({} more {} left out)", unusable.size() - 1,
                                                                unusable.size() == 2 ? "is" : "are");
    throw Error(error.kind(), fmt::format("{}; {}{}", error.message(), unusable.front(), more));
  }
}

}  // namespace

TraceSet read_traces(const std::string& folder) {
  std::error_code failure;
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder, failure)) {
    if (entry.path().extension() == ".trace") paths.push_back(entry.path());
  }
  if (failure) throw_invalid("folder '{}' cannot be read: {}", folder, failure.message());
  if (paths.empty()) {
    throw_invalid(
        "there is no trace in '{0}': run the program with 'torchspan run --trace {0} …' or "
        "TORCHSPAN_TRACE={0}",
        folder);
  }
  std::sort(paths.begin(), paths.end());
  std::vector<TraceContents> traces;
  std::vector<std::string> unusable;
  for (const auto& path : paths) {
    try {
      traces.push_back(decode_trace(read_bytes(path)));
    } catch (const Error& error) {
      unusable.push_back(fmt::format("'{}' is left out: {}", path.string(), error.message()));
    }
  }
  if (traces.empty()) throw_invalid("no trace in '{}' can be used: {}", folder, unusable.front());
  TraceSet set = align_usable(std::move(traces), unusable);
  set.notes.insert(set.notes.begin(), unusable.begin(), unusable.end());
  return set;
}

}  // namespace torchspan::launch
