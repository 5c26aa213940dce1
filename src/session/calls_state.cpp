#include "session/calls_state.h"

#include <nlohmann/json.hpp>

namespace torchspan {

std::string encode_calls(const DebugInfo& info) {
  using nlohmann::json;
  json pending = json::array(), serving = json::array();
  for (const DebugInfo::Pending& call : info.pending) {
    json entry = {
        {"call", call.call}, {"to", call.to}, {"site", call.site}, {"seconds", to_seconds(call.age)}};
    if (call.left != Duration::max()) entry["left"] = to_seconds(call.left);
    pending.push_back(std::move(entry));
  }
  for (const DebugInfo::Serving& call : info.serving) {
    serving.push_back(
        {{"call", call.call}, {"from", call.from}, {"seconds", to_seconds(call.age)}, {"begun", call.begun}});
  }
  return json{{"pending", pending},         {"serving", serving},      {"threads", info.pool_threads},
              {"queued", info.pool_queued}, {"sent", info.calls_sent}, {"handled", info.calls_handled}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace torchspan
