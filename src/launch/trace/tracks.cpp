#include "launch/trace/tracks.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <utility>

namespace torchspan::launch {
namespace {

constexpr std::array<std::string_view, 13> kKindTitles = {
    "calls", "handlers",    "autograd",    "optimizer", "buckets",   "pipeline", "waits",
    "user",  "collectives", "checkpoints", "modules",   "operators", "messages"};

/// Indices of all spans: by beginning, longer ones first.
std::vector<std::size_t> in_order(const std::vector<StoredSpan>& spans) {
  std::vector<std::size_t> order(spans.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return spans[a].begin != spans[b].begin ? spans[a].begin < spans[b].begin : spans[a].end > spans[b].end;
  });
  return order;
}

/// One row on which spans nest.
class NestedRow {
 public:
  explicit NestedRow(Track& track) : track_(&track) {}

  /// Adds a span if it does not overlap another in part; spans come in order.
  bool add(std::size_t index, const StoredSpan& span) {
    while (!open_.empty() && open_.back() <= span.begin) open_.pop_back();
    if (!open_.empty() && span.end > open_.back()) return false;
    open_.push_back(span.end);
    track_->spans.push_back(index);
    return true;
  }

 private:
  Track* track_;
  std::vector<std::int64_t> open_;  ///< ends of the enclosing spans
};

/// The rows of one kind, on which spans follow each other.
class FlatRows {
 public:
  explicit FlatRows(std::size_t most) : most_(most) {}

  bool add(std::size_t index, const StoredSpan& span) {
    for (Row& row : rows_) {
      if (row.end > span.begin) continue;
      row.spans.push_back(index);
      row.end = std::max(span.end, span.begin + 1);
      return true;
    }
    if (rows_.size() == most_) return false;
    rows_.push_back({std::max(span.end, span.begin + 1), {index}});
    return true;
  }

  void move_to(std::string_view title, int order, std::vector<Track>& tracks) {
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      tracks.push_back({rows_.size() == 1 ? std::string(title) : fmt::format("{} {}", title, i + 1),
                        order + static_cast<int>(i), std::move(rows_[i].spans)});
    }
  }

 private:
  struct Row {
    std::int64_t end;
    std::vector<std::size_t> spans;
  };
  const std::size_t most_;
  std::vector<Row> rows_;
};

}  // namespace

std::string_view kind_title(SpanKind kind) {
  const auto number = static_cast<std::size_t>(kind);
  return number < kKindTitles.size() ? kKindTitles[number] : "other";
}

Tracks make_tracks(const TraceContents& trace, std::size_t most_rows) {
  Tracks result;
  std::vector<Track> threads(trace.threads.size());
  std::vector<NestedRow> nested;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    const std::string& name = trace.threads[i];
    threads[i].title = name.empty() ? fmt::format("thread {}", i) : fmt::format("thread {} {}", i, name);
    threads[i].order = -1000 + static_cast<int>(std::min<std::size_t>(i, 999));
    nested.emplace_back(threads[i]);
  }
  std::map<std::pair<SpanKind, bool>, FlatRows> flat;  // by kind, and whether it is a phase of a step
  for (const std::size_t index : in_order(trace.spans)) {
    const StoredSpan& span = trace.spans[index];
    if (span.nested && nested[span.thread].add(index, span)) continue;
    const bool phase = span.kind == SpanKind::kBucket && span.link.part < 0;
    if (!flat.try_emplace({span.kind, phase}, most_rows).first->second.add(index, span)) {
      result.without_track.push_back(index);
    }
  }
  for (Track& thread : threads) {
    if (!thread.spans.empty()) result.tracks.push_back(std::move(thread));
  }
  for (auto& [group, rows] : flat) {
    const auto [kind, phase] = group;
    rows.move_to(phase ? "training" : kind_title(kind), phase ? -500 : static_cast<int>(kind) * 1000,
                 result.tracks);
  }
  return result;
}

}  // namespace torchspan::launch
