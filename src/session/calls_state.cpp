#include "session/calls_state.h"

#include <nlohmann/json.hpp>

namespace torchspan {

std::string encode_calls(const DebugInfo& info, const std::vector<autograd::RunningPass>& passes) {
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
  json running = json::array();
  for (const autograd::RunningPass& pass : passes) {
    running.push_back({{"id", pass.id}, {"busy", pass.busy}, {"waits", pass.waits}});
  }
  return json{{"pending", pending},
              {"serving", serving},
              {"passes", running},
              {"threads", info.pool_threads},
              {"queued", info.pool_queued},
              {"sent", info.calls_sent},
              {"handled", info.calls_handled},
              {"references",
               {{"owned", info.references.owners},
                {"shared", info.references.forks},
                {"unconfirmed", info.references.pending_users}}}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace torchspan
