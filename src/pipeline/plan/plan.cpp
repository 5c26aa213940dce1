#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <numeric>
#include <utility>

#include <torchspan/core/error.h>
#include <torchspan/pipeline/plan.h>

#include "core/api/throw_invalid.h"

namespace torchspan::pipeline {
namespace {

using Violations = std::vector<std::string>;

std::string use_name(const PlanRequest& request, std::size_t order) {
  const PlanRequest::Use& use = request.uses[order];
  const std::string& layer = request.layers[static_cast<std::size_t>(use.layer)];
  return fmt::format("layer '{}{}' (order {})", layer, use.method.empty() ? "" : "." + use.method, order);
}

void check_shape(const PlanRequest& request, Violations& violations) {
  if (request.uses.empty()) violations.push_back("there is no layer: add layers to Layers");
  for (std::size_t stage = 0; stage < request.balance.size(); ++stage) {
    if (request.balance[stage] < 1) {
      violations.push_back(
          fmt::format("balance[{}] is {}: every stage needs a layer", stage, request.balance[stage]));
    }
  }
  const int sum = std::accumulate(request.balance.begin(), request.balance.end(), 0);
  if (sum != static_cast<int>(request.layers.size())) {
    violations.push_back(fmt::format("balance {} has {} layers, the model has {} distinct ones",
                                     request.balance, sum, request.layers.size()));
  }
  if (request.workers.size() != request.balance.size()) {
    violations.push_back(fmt::format("{} stages need as many owners; workers has {}", request.balance.size(),
                                     request.workers.size()));
  }
}

/// The uses that stash and pop a name.
struct Stash {
  int order = 0;
  std::optional<int> popped_by;
};
using SpacedName = std::pair<std::string, std::string>;

std::string quoted(const SpacedName& name) {
  return name.first.empty() ? fmt::format("'{}'", name.second)
                            : fmt::format("'{}' in space '{}'", name.second, name.first);
}

/// Pairs every stash with its pop.
std::map<SpacedName, Stash> match_skips(const PlanRequest& request, Violations& violations) {
  std::map<SpacedName, Stash> stashes;
  for (std::size_t order = 0; order < request.uses.size(); ++order) {
    const PlanRequest::Use& use = request.uses[order];
    const std::string here = use_name(request, order);
    for (const std::string& name : use.pops) {
      const SpacedName key{use.space, name};
      const auto stash = stashes.find(key);
      if (stash == stashes.end()) {
        violations.push_back(fmt::format("{} pops {}, which no earlier layer stashes", here, quoted(key)));
      } else if (stash->second.popped_by) {
        violations.push_back(
            fmt::format("{} pops {}, which {} has popped already", here, quoted(key),
                        use_name(request, static_cast<std::size_t>(*stash->second.popped_by))));
      } else {
        stash->second.popped_by = static_cast<int>(order);
      }
    }
    for (const std::string& name : use.stashes) {
      const SpacedName key{use.space, name};
      const auto [stash, fresh] = stashes.emplace(key, Stash{static_cast<int>(order), std::nullopt});
      if (!fresh) {
        violations.push_back(
            fmt::format("{} stashes {}, which {} has stashed already; give one of them another space "
                        "(Use::in_space)",
                        here, quoted(key), use_name(request, static_cast<std::size_t>(stash->second.order))));
      }
    }
  }
  for (const auto& [key, stash] : stashes) {
    if (!stash.popped_by) {
      violations.push_back(fmt::format("{} stashes {}, which no later layer pops",
                                       use_name(request, static_cast<std::size_t>(stash.order)),
                                       quoted(key)));
    }
  }
  return stashes;
}

void place_layers(const PlanRequest& request, Plan& plan) {
  plan.locations.assign(request.layers.size(), Location{-1, 0});
  int stage = 0, index = 0;
  for (const PlanRequest::Use& use : request.uses) {
    Location& location = plan.locations[static_cast<std::size_t>(use.layer)];
    if (location.stage >= 0) continue;
    if (index == request.balance[static_cast<std::size_t>(stage)]) ++stage, index = 0;
    location = {stage, index++};
  }
  for (const std::string& worker : request.workers) {
    const auto known = std::find(plan.workers.begin(), plan.workers.end(), worker);
    plan.worker_of_stage.push_back(static_cast<int>(known - plan.workers.begin()));
    if (known == plan.workers.end()) plan.workers.push_back(worker);
  }
}

void make_invocations(const PlanRequest& request, Plan& plan) {
  for (std::size_t order = 0; order < request.uses.size(); ++order) {
    const PlanRequest::Use& use = request.uses[order];
    Invocation invocation;
    invocation.order = static_cast<int>(order);
    invocation.layer = use.layer;
    invocation.here = plan.locations[static_cast<std::size_t>(use.layer)];
    if (order > 0) {
      invocation.source = plan.invocations.back().here;
      plan.invocations.back().destination = invocation.here;
    }
    plan.methods.push_back(use.method);
    plan.invocations.push_back(invocation);
    if (!plan.layer_ranges.empty() && plan.layer_ranges.back().stage == invocation.here.stage) {
      plan.layer_ranges.back().last = invocation.order;
    } else {
      plan.layer_ranges.push_back({invocation.here.stage,
                                   plan.worker_of_stage[static_cast<std::size_t>(invocation.here.stage)],
                                   invocation.order, invocation.order});
    }
  }
}

void make_links(const std::map<SpacedName, Stash>& stashes, Plan& plan) {
  for (int range = 0; range + 1 < static_cast<int>(plan.layer_ranges.size()); ++range) {
    const int last = plan.layer_ranges[static_cast<std::size_t>(range)].last;
    plan.links.push_back({range, range + 1, last, last + 1, ""});
  }
  for (const auto& [name, stash] : stashes) {
    const int from = plan.layer_range_of(stash.order), to = plan.layer_range_of(*stash.popped_by);
    if (from == to) {
      plan.local_skips.push_back({name.second, stash.order, *stash.popped_by});
    } else {
      plan.links.push_back({from, to, stash.order, *stash.popped_by, name.second});
    }
  }
}

}  // namespace

int Plan::layer_range_of(int order) const {
  const auto range = std::find_if(layer_ranges.begin(), layer_ranges.end(),
                                  [&](const LayerRange& each) { return order <= each.last; });
  return static_cast<int>(range - layer_ranges.begin());
}

std::string Plan::describe(int order) const {
  const Invocation& invocation = invocations[static_cast<std::size_t>(order)];
  const std::string& method = methods[static_cast<std::size_t>(order)];
  const int worker = worker_of_stage[static_cast<std::size_t>(invocation.here.stage)];
  return fmt::format("layer '{}{}' (order {}, stage {} on '{}')",
                     layers[static_cast<std::size_t>(invocation.layer)], method.empty() ? "" : "." + method,
                     order, invocation.here.stage, workers[static_cast<std::size_t>(worker)]);
}

schedule::Placement Plan::placement(int micro_batches) const {
  schedule::Placement placement;
  for (const LayerRange& range : layer_ranges) placement.rank_of_stage.push_back(range.worker);
  placement.micro_batches = micro_batches;
  placement.ranks = static_cast<int>(workers.size());
  return placement;
}

Plan make_plan(const PlanRequest& request) {
  Violations violations;
  check_shape(request, violations);
  const auto stashes = match_skips(request, violations);
  if (!violations.empty()) {
    throw_invalid("the pipeline cannot be created:\n- {}", fmt::join(violations, "\n- "));
  }
  Plan plan;
  plan.layers = request.layers;
  place_layers(request, plan);
  make_invocations(request, plan);
  make_links(stashes, plan);
  return plan;
}

std::string to_text(const Plan& plan) {
  std::string text;
  for (std::size_t s = 0; s < plan.layer_ranges.size(); ++s) {
    const LayerRange& range = plan.layer_ranges[s];
    std::vector<std::string> names;
    for (int order = range.first; order <= range.last; ++order) {
      const std::string& method = plan.methods[static_cast<std::size_t>(order)];
      const Invocation& invocation = plan.invocations[static_cast<std::size_t>(order)];
      names.push_back(plan.layers[static_cast<std::size_t>(invocation.layer)] +
                      (method.empty() ? "" : "." + method));
    }
    text += fmt::format("layer range {}: stage {} on {}: {}\n", s, range.stage,
                        plan.workers[static_cast<std::size_t>(range.worker)], fmt::join(names, " > "));
  }
  for (const Link& link : plan.links) {
    if (!link.skip.empty())
      text += fmt::format("skip '{}': layer range {} to {}\n", link.skip, link.from, link.to);
  }
  return text;
}

}  // namespace torchspan::pipeline
