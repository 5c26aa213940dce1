#include "pipeline/runtime/handshake.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <optional>
#include <set>
#include <string_view>

#include <torch/nn/module.h>

#include <torchspan/detail/device/streams.h>
#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/schedule.h>
#include <torchspan/wire.h>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/random.h"
#include "pipeline/plan/replica_grid.h"
#include "pipeline/policies/tables.h"
#include "pipeline/runtime/agreement.h"
#include "pipeline/runtime/overlap.h"
#include "pipeline/runtime/shared_parameters.h"
#include "pipeline/runtime/step_exchange.h"

namespace torchspan::pipeline {
namespace {

/// Splits the layers evenly; the first stages get one more.
std::vector<int> even_balance(std::size_t layers, std::size_t stages) {
  std::vector<int> balance;
  for (std::size_t stage = 0; stage < stages; ++stage) {
    balance.push_back(static_cast<int>(layers / stages + (stage < layers % stages ? 1 : 0)));
  }
  return balance;
}

bool is_v_shaped(Schedule schedule) { return schedule == Schedule::kZBV || schedule == Schedule::kDualPipeV; }

/// How many replicas `workers` workers form; 1 for a number that does not fit, which check() refuses on all workers.
std::size_t replicas_among(std::size_t workers, const PipelineOptions& options) {
  const auto replicas = static_cast<std::size_t>(std::max(1, options.replicas));
  return workers % replicas == 0 && workers > 0 ? replicas : 1;
}

void fill_in(const Worker& worker, std::size_t layers, PipelineOptions& options) {
  const std::vector<WorkerInfo> world = worker.workers();
  const bool v_shaped = is_v_shaped(options.schedule);
  const std::size_t replicas =
      replicas_among(options.workers.empty() ? world.size() : options.workers.size(), options);
  const std::size_t ranks = world.size() / replicas;  // of a replica, if its workers are not given
  if (options.balance.empty()) {
    // A model without layers gets a stage per worker, so that all workers get the error.
    const std::size_t most = v_shaped ? 2 * ranks : layers == 0 ? ranks : std::min(ranks, layers);
    const std::size_t stages = options.workers.empty() ? most : options.workers.size() / replicas;
    options.balance = even_balance(layers, stages);
  }
  if (!options.workers.empty()) return;
  for (std::size_t replica = 0; replica < replicas; ++replica) {
    for (std::size_t stage = 0; stage < options.balance.size(); ++stage) {
      const std::size_t rank = stage % ranks;
      const bool back = v_shaped && stage / ranks % 2 == 1;
      options.workers.push_back(world[replica * ranks + (back ? ranks - 1 - rank : rank)].name);
    }
  }
}

void check(const PipelineOptions& options, std::size_t layers) {
  const auto refuse = [](const std::string& why) { throw_invalid("PipelineOptions::" + why); };
  for (const int layer : options.checkpoint_layers) {
    if (layer >= 0 && static_cast<std::size_t>(layer) < layers) continue;
    refuse(fmt::format("checkpoint_layers contains {}; the model has layers 0 to {}", layer,
                       static_cast<std::int64_t>(layers) - 1));
  }
  if (!options.checkpoint_layers.empty() && options.checkpoint == ActivationCheckpoint::kNever)
    refuse("checkpoint_layers has no effect with ActivationCheckpoint::kNever; set checkpoint, or remove it");
  if (options.offload && options.checkpoint == ActivationCheckpoint::kNever)
    refuse("offload copies what checkpointed micro-batches keep; set checkpoint, or remove offload");
  if (options.offload && !options.checkpoint_layers.empty())
    refuse("offload copies the inputs of whole layer ranges; remove checkpoint_layers or offload");
  if (options.micro_batches < 1)
    refuse(fmt::format("micro_batches is {}; it must be 1 or more", options.micro_batches));
  if (options.max_in_flight < 0)
    refuse(fmt::format("max_in_flight is {}; it must be 0 (what the schedule needs) or more",
                       options.max_in_flight));
  if (options.staleness < 0 || options.staleness > 1)
    refuse(fmt::format("staleness is {}; it must be 0 or 1", options.staleness));
  if (options.staleness > 0 && options.schedule == Schedule::kArrival)
    refuse("staleness 1 needs a schedule that bounds the activations of a worker; kArrival does not");
  if (options.stall_timeout <= Duration::zero()) refuse("stall_timeout must be more than zero");
  if ((options.schedule == Schedule::kCustom) != (options.custom_schedule != nullptr))
    refuse("custom_schedule must be set if schedule is kCustom, and only then");
}

PlanRequest plan_request(const Layers& layers, const PipelineOptions& options) {
  PlanRequest request;
  for (const LayerSpec& spec : layers.specs()) request.layers.push_back(spec.name);
  for (const LayerUse& use : layers.uses()) {
    request.uses.push_back({use.layer, use.stashes, use.pops, use.space, use.method});
  }
  request.balance = options.balance;
  request.workers = options.workers;
  return request;
}

/// Text of everything that must be the same on all workers. Its lines are those of release 0.1.0, except for pipelines whose
/// workers exchange initial values: that release exchanges them otherwise.
std::string fingerprint(const PlanRequest& request, const Layers& layers, const PipelineOptions& options) {
  std::string text = fmt::format("layers {}\n{}", fmt::join(request.layers, ", "), to_text(layers.ties()));
  for (const PlanRequest::Use& use : request.uses) {
    text += fmt::format("use of layer {} method '{}' stashes {} pops {} space '{}'\n", use.layer, use.method,
                        use.stashes, use.pops, use.space);
  }
  if (!layers.ties().empty() || options.replicas > 1) text += "initial values are sent between workers\n";
  return text + fmt::format(
                    "balance {}\nowners {}\nreplicas {}\nmicro_batches {}\nschedule {}\ncheckpoint "
                    "{}\ncheckpoint_layers {}\noffload {}\nstaleness {}\nmax_in_flight "
                    "{}\nseed {}\n",
                    request.balance, request.workers, options.replicas, options.micro_batches,
                    static_cast<int>(options.schedule), static_cast<int>(options.checkpoint),
                    options.checkpoint_layers, options.offload, options.staleness, options.max_in_flight,
                    options.seed ? std::to_string(*options.seed) : "none");
}

/// The first lines in which two fingerprints differ.
std::pair<std::string, std::string> difference(const std::string& a, const std::string& b) {
  const std::size_t at =
      static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  const auto line = [at](const std::string& text) {
    const std::size_t begin = at == 0 ? 0 : text.rfind('\n', at - 1) + 1;
    return begin >= text.size() ? std::string("nothing more")
                                : text.substr(begin, text.find('\n', begin) - begin);
  };
  return {line(a), line(b)};
}

/// Throws because two workers, the first of each pair, have different lines in the descriptions of a pipeline.
[[noreturn]] void refuse_mismatch(const std::string& pipeline, const std::pair<std::string, std::string>& one,
                                  const std::pair<std::string, std::string>& other) {
  throw_invalid("the workers create different pipelines '{}': worker '{}' has \"{}\", worker '{}' has \"{}\"",
                pipeline, one.first, one.second, other.first, other.second);
}

/// Throws unless all workers have the same description of the pipeline. Returns the seed of the initial weights, which is the
/// first worker's, and the number of the pipeline among those of these workers and name.
std::pair<std::uint64_t, std::uint64_t> agree(const Worker& worker, const std::string& mine,
                                              const PipelineOptions& options) {
  const std::vector<std::string> workers = distinct(options.workers);
  if (std::find(workers.begin(), workers.end(), worker.name()) == workers.end()) {
    throw_invalid("worker '{}' owns no stage of pipeline '{}' and must not create it; its workers are {}",
                  worker.name(), options.name, fmt::join(workers, ", "));
  }
  // All workers draw, so that their generators stay in the same state; the first worker's number is used.
  const std::uint64_t seed = options.seed ? *options.seed : draw_seed();
  std::uint64_t number = worker.extension<PipelineExtension>().router()->next_number(
      options.name, fmt::format("{}", fmt::join(workers, "\n")));
  auto texts = all_gather_text(worker, fmt::format("{:016x}{:016x}{}", seed, number, mine), workers,
                               kCreationTimeout, options.while_waiting);
  const std::uint64_t first_seed = std::stoull(texts.front().substr(0, 16), nullptr, 16);
  for (std::string& text : texts) {
    number = std::max<std::uint64_t>(number, std::stoull(text.substr(16, 16), nullptr, 16));
    text.erase(0, 32);
  }
  if (const auto other = first_difference(texts)) {
    const auto [there, here] = difference(texts.front(), texts[*other]);
    refuse_mismatch(options.name, {workers.front(), there}, {workers[*other], here});
  }
  return {first_seed, number};
}

void build_own_layers(const Layers& layers, std::uint64_t seed, LocalPipeline& local) {
  local.layers.resize(layers.specs().size());
  for (std::size_t layer = 0; layer < layers.specs().size(); ++layer) {
    const int stage = local.plan.locations[layer].stage;
    if (local.plan.worker_of_stage[static_cast<std::size_t>(stage)] != local.me) continue;
    try {
      const SeededScope random(seed_of_layer(seed, static_cast<int>(layer)));
      local.layers[layer] = layers.specs()[layer].build();
    } catch (...) {
      throw Error(ErrorKind::kRemoteFailure,
                  fmt::format("layer '{}' (stage {}) could not be built on worker '{}': {}",
                              layers.specs()[layer].name, stage, local.worker.name(),
                              describe(std::current_exception()).text));
    }
  }
}

void list_parameters(LocalPipeline& local) {
  std::set<const void*> seen;
  for (std::size_t layer = 0; layer < local.layers.size(); ++layer) {
    if (!local.layers[layer].module) continue;
    for (const auto& item : local.layers[layer].module->named_parameters()) {
      if (seen.insert(item.value().unsafeGetTensorImpl()).second)
        local.parameters.push_back({static_cast<int>(layer), item.key(), item.value()});
    }
  }
}

/// Throws if the layers of this worker cannot offload.
void check_offload(const LocalPipeline& local) {
  for (const LayerParameter& parameter : local.parameters) {
    if (device::has_streams(parameter.tensor.device())) continue;
    throw_invalid(
        "PipelineOptions::offload copies activations from a GPU to host memory, but layer '{}' of worker "
        "'{}' is on device {}: remove offload, or construct the layer on a GPU",
        local.plan.layers[static_cast<std::size_t>(parameter.layer)], local.worker.name(),
        parameter.tensor.device().str());
  }
}

/// The devices of this worker's layer ranges, for StageDevices::read().
std::string report_devices(const LocalPipeline& local) {
  std::string text;
  for (int range = 0; range <= local.last_layer_range(); ++range) {
    if (!local.owns_layer_range(range)) continue;
    if (const auto device = local.device_of_range(range)) text += StageDevices::line(range, *device);
  }
  return text;
}

/// The beginning of a report, before the pipeline's name. The name is not in fingerprint(), whose lines must be those of
/// release 0.1.0. That release takes this line for a tensor that the workers have tied, and ignores it.
constexpr std::string_view kNameLine = "-9223372036854775808\t2\t";

std::string report_name(std::string name) {
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '\t' || c == '\n'; }, ' ');
  return fmt::format("{}{}\t\n", kNameLine, name);
}

/// Throws unless all workers that report a name have the same one.
void compare_names(const LocalPipeline& local, const std::vector<std::string>& reports) {
  std::optional<std::pair<std::string, std::string>> first;
  const std::vector<std::string> workers = local.grid.all_names();
  for (std::size_t i = 0; i < workers.size(); ++i) {
    std::string_view report = reports[i];
    if (!report.starts_with(kNameLine)) continue;
    report.remove_prefix(kNameLine.size());
    const std::pair<std::string, std::string> mine{
        workers[i], fmt::format("name {}", report.substr(0, report.find('\t')))};
    if (!first) first = mine;
    if (mine.second != first->second) refuse_mismatch(local.options.name, *first, mine);
  }
}

/// Waits until all workers have an event queue and their layers, so that no message arrives too early.
void build_together(const Layers& layers, std::uint64_t seed, LocalPipeline& local) {
  const auto build = [&] {
    build_own_layers(layers, seed, local);
    list_parameters(local);
    if (local.options.staleness > 0) check_versions(local);
    if (local.options.offload) check_offload(local);
    return report_name(local.options.name) + report_shared_tensors(local, layers) + report_devices(local);
  };
  const std::vector<std::string> workers = local.grid.all_names();
  const auto reports =
      all_or_none(local.worker, workers, ErrorKind::kRemoteFailure, build, local.options.while_waiting);
  std::vector<std::string> of_replica;  // the other replicas have the same
  const std::vector<std::string>& own = local.plan.workers;
  for (std::size_t i = 0; i < workers.size(); ++i) {
    if (std::find(own.begin(), own.end(), workers[i]) != own.end()) of_replica.push_back(reports[i]);
    local.grid.devices.read(local.worker.info(Destination(workers[i])).rank, reports[i]);
  }
  compare_names(local, reports);
  local.constants = check_shared_tensors(local, of_replica);
}

/// Throws unless all workers have the same valid table of Schedule::kCustom.
void agree_on_custom_schedule(const LocalPipeline& local) {
  if (local.options.schedule != Schedule::kCustom) return;
  const std::vector<std::string> workers = local.grid.all_names();
  const auto digest = [&] {
    const schedule::Table table = Tables(local).custom(local.options.micro_batches);
    return fmt::format("{:016x}", wire::digest(schedule::to_csv(schedule::to_sheet(table))));
  };
  const auto digests =
      all_or_none(local.worker, workers, ErrorKind::kInvalid, digest, local.options.while_waiting);
  if (const auto other = first_difference(digests)) {
    throw_invalid(
        "PipelineOptions::custom_schedule returns different tables on workers '{}' and '{}' of pipeline "
        "'{}'; it must return the same one on all",
        workers.front(), workers[*other], local.options.name);
  }
}

/// The replicas, and the place of this worker.
ReplicaGrid make_grid(const Worker& worker, const std::vector<std::vector<std::string>>& owners) {
  ReplicaGrid grid;
  for (const auto& replica : owners) {
    const std::vector<std::string> names = distinct(replica);
    if (std::find(names.begin(), names.end(), worker.name()) != names.end()) grid.mine = grid.count();
    grid.names.push_back(names);
    grid.ranks.emplace_back();
    for (const std::string& name : names) grid.ranks.back().push_back(worker.info(Destination(name)).rank);
  }
  return grid;
}

}  // namespace

LocalPipeline make_unconnected(const Worker& worker, const Layers& layers, PipelineOptions options) {
  fill_in(worker, layers.specs().size(), options);
  check(options, layers.specs().size());
  PlanRequest request = plan_request(layers, options);
  request.workers = owners_by_replica(options.workers, options.replicas, options.balance.size()).front();
  Plan plan = make_plan(request);
  LocalPipeline local{worker, std::move(options), std::move(plan)};
  local.uses = layers.uses();
  local.layers.resize(layers.specs().size());
  return local;
}

LocalPipeline make_local(const Worker& worker, const Layers& layers, PipelineOptions options) {
  fill_in(worker, layers.specs().size(), options);
  PlanRequest request = plan_request(layers, options);
  // First, because what follows may throw on one worker only.
  const auto [seed, number] = agree(worker, fingerprint(request, layers, options), options);
  check(options, layers.specs().size());
  const auto owners = owners_by_replica(options.workers, options.replicas, options.balance.size());
  ReplicaGrid grid = make_grid(worker, owners);
  request.workers = owners[static_cast<std::size_t>(grid.mine)];
  Plan plan = make_plan(request);
  LocalPipeline local{worker, std::move(options), std::move(plan)};
  const auto me = std::find(local.plan.workers.begin(), local.plan.workers.end(), worker.name());
  local.me = static_cast<int>(me - local.plan.workers.begin());
  local.grid = std::move(grid);
  local.uses = layers.uses();
  for (const LayerRange& range : local.plan.layer_ranges) {
    const std::string layer = local.plan.describe(range.first);
    local.wait_names.push_back({"wait for activations at " + layer, "wait for gradients at " + layer});
  }
  local.declared_ties = layers.ties();
  auto opened = worker.extension<PipelineExtension>().router()->open(
      local.options.name, fmt::format("{}", fmt::join(distinct(local.options.workers), "\n")), number,
      worker.backend()->continuations());
  local.id = opened.id;
  local.event_queue = std::move(opened.event_queue);
  build_together(layers, seed, local);
  share_initial_values(local, layers);
  agree_on_custom_schedule(local);
  local.replica_buckets = make_replica_buckets(local);
  Log& log = worker.runtime().log;
  if (log.enabled(LogLevel::kDebug)) {
    log.debug(fmt::format("pipeline '{}': {} layers, balance {} on {}; {} micro-batches", local.options.name,
                          local.plan.layers.size(), local.options.balance, local.options.workers,
                          local.options.micro_batches));
  }
  return local;
}

}  // namespace torchspan::pipeline
