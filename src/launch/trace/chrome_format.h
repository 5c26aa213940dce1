#pragma once
// For tests: what Perfetto and chrome://tracing require of a trace in Chrome's JSON format.
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace torchspan::launch {

/// Finds what violates the format ("Trace Event Format", and the notes on it in Perfetto's documentation): members that
/// are absent or have another type, slices of a row that overlap in part, unbalanced asynchronous events, arrows that do
/// not end inside slices or share an id, rows without a name.
class ChromeFormat {
 public:
  explicit ChromeFormat(const nlohmann::json& document) {
    if (!document.is_object() || !document.contains("traceEvents") || !document["traceEvents"].is_array()) {
      fault("there is no array traceEvents", document);
      return;
    }
    for (const auto& event : document["traceEvents"]) check(event);
    check_slices();
    check_arrows();
    for (const auto& [id, open] : asynchronous_) {
      if (open.first != 1 || open.second != 1) fault("an asynchronous event is not balanced", id);
    }
  }
  const std::vector<std::string>& faults() const { return faults_; }

 private:
  using Json = nlohmann::json;
  using Row = std::pair<std::int64_t, std::int64_t>;  ///< process, thread
  struct Slice {
    std::int64_t begin, end;
  };
  struct ArrowEnd {
    Row row;
    std::int64_t at;
  };

  void fault(const std::string& what, const Json& where) { faults_.push_back(what + ": " + where.dump()); }

  static bool is_id(const Json& event, const char* name) {
    return event.contains(name) && event[name].is_number_integer() && event[name].get<std::int64_t>() >= 0 &&
           event[name].get<std::int64_t>() <= 0xffffffff;
  }
  static std::int64_t nanoseconds(const Json& value) { return std::llround(value.get<double>() * 1000); }

  void check(const Json& event) {
    if (!event.is_object() || !event.contains("ph") || !event["ph"].is_string())
      return fault("no phase", event);
    const std::string phase = event["ph"];
    if (!is_id(event, "pid")) return fault("no process", event);
    if (phase != "C" && !is_id(event, "tid")) return fault("no thread", event);
    if (!event.contains("name") || !event["name"].is_string()) return fault("no name", event);
    if (event.contains("args") && !event["args"].is_object()) return fault("no arguments", event);
    if (phase == "M") return check_metadata(event);
    if (!event.contains("ts") || !event["ts"].is_number()) return fault("no time", event);
    if (phase == "C") return check_counter(event);
    if (!event.contains("cat") || !event["cat"].is_string()) return fault("no category", event);
    const Row row(event["pid"].get<std::int64_t>(), event["tid"].get<std::int64_t>());
    const std::int64_t at = nanoseconds(event["ts"]);
    if (phase == "X") {
      if (!event.contains("dur") || !event["dur"].is_number() || event["dur"] < 0) {
        return fault("no duration", event);
      }
      slices_[row].push_back({at, at + nanoseconds(event["dur"])});
    } else if (phase == "b" || phase == "e") {
      if (!event.contains("id")) return fault("no id", event);
      auto& open = asynchronous_[event["cat"].dump() + event["id"].dump() + event["name"].dump()];
      if (phase == "e" && open.first != 1) fault("ends before it begins", event);
      ++(phase == "b" ? open.first : open.second);
    } else if (phase == "s" || phase == "f") {
      if (!event.contains("id") || !event["id"].is_number()) return fault("no number of an arrow", event);
      auto& ends =
          (phase == "s" ? starts_ : ends_)[event["cat"].dump() + event["name"].dump() + event["id"].dump()];
      if (!ends.empty()) fault("a second arrow with this id", event);
      ends.push_back({row, at});
      if (phase == "f" && event.value("bp", "") != "e") fault("binds to the next slice", event);
    } else {
      fault("unknown phase", event);
    }
  }

  void check_metadata(const Json& event) {
    static const std::map<std::string, std::string> kMembers = {{"process_name", "name"},
                                                                {"process_labels", "labels"},
                                                                {"process_sort_index", "sort_index"},
                                                                {"thread_name", "name"},
                                                                {"thread_sort_index", "sort_index"}};
    const std::string name = event["name"];
    const auto member = kMembers.find(name);
    if (member == kMembers.end()) return fault("unknown metadata", event);
    if (!event.contains("args") || !event["args"].contains(member->second)) return fault("no value", event);
    const Json& value = event["args"][member->second];
    if (member->second == "sort_index" ? !value.is_number_integer() : !value.is_string()) {
      fault("a value of another type", event);
    }
    const bool of_thread = name.starts_with("thread");
    const Row row(event["pid"].get<std::int64_t>(), of_thread ? event["tid"].get<std::int64_t>() : -1);
    if (!named_[name].insert(row).second) fault("named twice", event);
  }

  void check_counter(const Json& event) {
    if (!event.contains("args") || event["args"].empty()) return fault("no values", event);
    for (const auto& [name, value] : event["args"].items()) {
      if (!value.is_number()) fault("a value that is not a number", event);
    }
  }

  void check_slices() {
    for (auto& [row, slices] : slices_) {
      const Json where = {row.first, row.second};
      if (!named_["thread_name"].contains(row)) fault("a row without a name", where);
      if (!named_["process_name"].contains({row.first, -1})) fault("a process without a name", where);
      std::vector<std::int64_t> open;
      for (const Slice& slice : slices) {  // in the order of the file
        while (!open.empty() && open.back() <= slice.begin) open.pop_back();
        if (!open.empty() && slice.end > open.back()) fault("overlaps another slice in part", slice.begin);
        open.push_back(slice.end);
      }
    }
  }

  bool is_inside_slice(const ArrowEnd& end) {
    for (const Slice& slice : slices_[end.row]) {
      if (slice.begin <= end.at && end.at < slice.end) return true;
    }
    return false;
  }
  void check_arrows() {
    for (const auto& [id, start] : starts_) {
      const auto end = ends_.find(id);
      if (end == ends_.end()) {
        fault("an arrow without an end", id);
      } else if (!is_inside_slice(start.front()) || !is_inside_slice(end->second.front())) {
        fault("an arrow that ends outside of slices", id);
      }
    }
    for (const auto& [id, end] : ends_) {
      if (!starts_.contains(id)) fault("an arrow without a beginning", id);
    }
  }

  std::vector<std::string> faults_;
  std::map<Row, std::vector<Slice>> slices_;
  std::map<std::string, std::pair<int, int>> asynchronous_;
  std::map<std::string, std::vector<ArrowEnd>> starts_, ends_;
  std::map<std::string, std::set<Row>> named_;
};

}  // namespace torchspan::launch
