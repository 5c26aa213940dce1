#include "launch/trace/json_events.h"

#include <cstdlib>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <ostream>

namespace torchspan::launch {

std::string json_string(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

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

}  // namespace torchspan::launch
