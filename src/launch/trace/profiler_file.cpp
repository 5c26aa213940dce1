#include "launch/trace/profiler_file.h"

#include <cmath>
#include <fmt/format.h>
#include <istream>
#include <map>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/json_fields.h"
#include "core/api/throw_invalid.h"

namespace torchspan::launch {
namespace {

using nlohmann::json;

constexpr auto kReplace = json::error_handler_t::replace;

/// Numbers texts in the order in which they first appear.
class Numbering {
 public:
  explicit Numbering(std::vector<std::string>& texts) : texts_(texts) {}
  std::uint32_t operator()(const std::string& text) {
    const auto [place, added] = known_.try_emplace(text, static_cast<std::uint32_t>(texts_.size()));
    if (added) texts_.push_back(text);
    return place->second;
  }

 private:
  std::vector<std::string>& texts_;
  std::map<std::string, std::uint32_t> known_;
};

const json* member(const json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

std::string string_of(const json& object, const char* name) {
  return json_field<std::string>(object, name).value_or("");
}

/// A process, thread or arrow as the file names it: a number or a text.
std::string key_of(const json& object, const char* name) {
  const json* value = member(object, name);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  return value->is_number() ? value->dump() : "";
}

/// Nanoseconds of a member in microseconds; nullopt if it is not a number of a sensible size.
std::optional<std::int64_t> nanoseconds_of(const json& object, const char* name) {
  constexpr double kMost = 2.2e15;  // the year 2039; sums of such times do not overflow
  const json* value = member(object, name);
  if (value == nullptr || !value->is_number()) return std::nullopt;
  const auto size = value->get<double>();
  if (!(std::abs(size) <= kMost)) return std::nullopt;
  if (value->is_number_integer()) return value->get<std::int64_t>() * 1000;
  const double whole = std::floor(size);
  return static_cast<std::int64_t>(whole) * 1000 + std::llround((size - whole) * 1000);
}

/// Whether `torchspan trace` wrote the document.
bool is_merged(const json& document) {
  const json* other = member(document, "otherData");
  return other != nullptr && other->is_object() && string_of(*other, "tool") == "torchspan trace";
}

class ProfilerFile {
 public:
  void add(const json& event) {
    const std::string phase = string_of(event, "ph");
    if (phase == "M") return add_metadata(event);
    const auto begin = nanoseconds_of(event, "ts");
    if (phase == "X") {
      add_event(event, begin, nanoseconds_of(event, "dur"));
    } else if ((phase == "s" || phase == "f") && begin) {
      add_arrow(event, phase == "s", *begin);
    }
  }

  ProfilerTrace take(const json& rest) {
    std::int64_t base = 0;
    if (const json* value = member(rest, "baseTimeNanoseconds"); value != nullptr && value->is_number()) {
      if (std::abs(value->get<double>()) < 4e18) base = value->get<std::int64_t>();
    }
    if (const json* job = member(rest, "distributedInfo"))
      trace_.rank = json_field<std::int64_t>(*job, "rank");
    for (ProfilerEvent& event : trace_.events) {
      event.begin += base;
      event.end += base;
    }
    for (const auto& [key, arrow] : arrows_) {
      if (!arrow.first || !arrow.second) continue;
      trace_.arrows.push_back({*arrow.first, *arrow.second});
      trace_.arrows.back().from.at += base;
      trace_.arrows.back().to.at += base;
    }
    name_rows();
    return std::move(trace_);
  }

 private:
  using RowKey = std::pair<std::string, std::string>;  ///< process, thread

  void add_metadata(const json& event) {
    const json* arguments = member(event, "args");
    if (arguments == nullptr || !arguments->is_object()) return;
    const std::string what = string_of(event, "name");
    const std::string process = key_of(event, "pid");
    if (what == "thread_name") thread_names_[{process, key_of(event, "tid")}] = string_of(*arguments, "name");
    if (what == "process_labels") labels_[process] = string_of(*arguments, "labels");
  }

  void add_event(const json& event, std::optional<std::int64_t> begin, std::optional<std::int64_t> length) {
    const std::string name = string_of(event, "name");
    if (!begin || !length || *length < 0 || name.empty() || member(event, "tid") == nullptr) {
      ++trace_.unusable;
      return;
    }
    ProfilerEvent added{
        *begin, *begin + *length, name_(name), category_(string_of(event, "cat")), row_of(event), ""};
    if (const json* arguments = member(event, "args"); arguments != nullptr && arguments->is_object()) {
      const std::string text = arguments->dump(-1, ' ', true, kReplace);
      added.arguments = text.substr(1, text.size() - 2);
    }
    if (const auto process = json_field<std::int64_t>(event, "pid")) pids_[key_of(event, "pid")] = *process;
    trace_.events.push_back(std::move(added));
  }

  void add_arrow(const json& event, bool starts, std::int64_t at) {
    auto& [from, to] = arrows_[string_of(event, "cat") + '\n' + key_of(event, "id")];
    (starts ? from : to) = ProfilerArrow::End{row_of(event), at};
  }

  std::uint32_t row_of(const json& event) {
    const RowKey key(key_of(event, "pid"), key_of(event, "tid"));
    const auto [place, added] = rows_.try_emplace(key, static_cast<std::uint32_t>(rows_.size()));
    return place->second;
  }

  /// Devices are processes with small numbers in these files; their labels begin with "GPU".
  bool is_device(const std::string& process) const {
    const auto label = labels_.find(process);
    return label != labels_.end() && !label->second.starts_with("CPU");
  }

  void name_rows() {
    trace_.rows.resize(rows_.size());
    for (const auto& [key, row] : rows_) {
      const auto& [process, thread] = key;
      const auto named = thread_names_.find(key);
      const std::string name =
          named != thread_names_.end() && !named->second.empty() ? named->second : "thread " + thread;
      const std::string prefix = is_device(process) ? labels_.at(process) + " " : "";
      trace_.rows[row] = fmt::format("profiler: {}{}", prefix, name);
    }
    for (const auto& [process, id] : pids_) {
      if (!is_device(process)) trace_.processes.insert(id);
    }
  }

  ProfilerTrace trace_;
  Numbering name_{trace_.names}, category_{trace_.categories};
  std::map<RowKey, std::uint32_t> rows_;
  std::map<RowKey, std::string> thread_names_;
  std::map<std::string, std::string> labels_;  ///< by process
  std::map<std::string, std::int64_t> pids_;   ///< numbers of processes
  std::map<std::string, std::pair<std::optional<ProfilerArrow::End>, std::optional<ProfilerArrow::End>>>
      arrows_;
};

}  // namespace

std::optional<ProfilerTrace> decode_profile(std::istream& file) {
  ProfilerFile decoded;
  bool found = false;
  std::string member_name;  // of the outermost object
  // Events are taken as soon as they are complete, and not kept: a file may be larger than the memory.
  const auto take_events = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key && depth == 1) member_name = value.get<std::string>();
    if (depth == 1 && event == json::parse_event_t::array_start && member_name == "traceEvents") found = true;
    if (event != json::parse_event_t::object_end || depth != 2 || member_name != "traceEvents") return true;
    decoded.add(value);
    return false;
  };
  json rest;
  try {
    rest = json::parse(file, take_events);
  } catch (const json::exception& error) {
    throw_invalid("this is not JSON: {}", error.what());
  }
  if (!found || !rest.is_object() || is_merged(rest)) return std::nullopt;
  return decoded.take(rest);
}

}  // namespace torchspan::launch
