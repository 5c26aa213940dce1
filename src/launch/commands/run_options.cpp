#include "launch/commands/run_options.h"

#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <csignal>
#include <filesystem>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"

namespace torchspan::launch {

void describe_observation(CLI::App& run, ObservationRequest& request) {
  run.add_option("--trace", request.trace,
                 "Folder for the workers' traces; afterwards: torchspan report FOLDER -o run.html");
  run.add_option("--metrics-port", request.metrics_port,
                 "Serve Prometheus metrics at 127.0.0.1: rank r at this port + r; 0: free ports")
      ->check(CLI::Range(0, 65535));
  run.add_option("--tensorboard", request.tensorboard,
                 "Folder for event files with the scalars that the program logs");
  run.add_option("--scalars", request.scalars, "Folder for the same scalars as JSON lines");
}

std::map<std::string, std::string> observation_variables(const ObservationRequest& request) {
  std::map<std::string, std::string> variables;
  const auto folder = [&](const char* name, const std::string& path) {
    if (!path.empty()) variables[name] = std::filesystem::absolute(path).lexically_normal().string();
  };
  folder("TORCHSPAN_TRACE", request.trace);
  folder("TORCHSPAN_TENSORBOARD", request.tensorboard);
  folder("TORCHSPAN_SCALARS", request.scalars);
  if (request.metrics_port) variables["TORCHSPAN_METRICS_PORT"] = std::to_string(*request.metrics_port);
  return variables;
}

namespace {

void describe_restarts(CLI::App& run, RunOptions& options) {
  run.add_option(
         "--max-restarts", options.job.restarts.most,
         "Restart all workers, with --nnodes those of all hosts, up to this many times after a failure; exit "
         "codes 126 and 127 (the program cannot be run) and interruptions are not restarted")
      ->check(CLI::Range(0, 1000));
  run.add_option(
         "--max-replacements", options.job.restarts.most_replacements,
         "Start a failed worker other than rank 0 again while the others continue, up to this many times "
         "for all workers together; then --max-restarts applies. The program must handle the death of a "
         "worker")
      ->check(CLI::Range(0, 100000));
  run.add_option(
      "--restart-backoff", options.backoff,
      "Time before the first restart of the job, and of each worker; doubles with each failure until "
      "an attempt or worker runs for 5 minutes");
  run.add_option("--max-backoff", options.longest_backoff, "Limit of that doubling");
  run.add_option("--give-up-after", options.job.restarts.give_up_after,
                 "End early after this many attempts in a row (replacements: processes of a rank) that fail "
                 "within 10 "
                 "seconds of their start with the same exit code or signal; 0: never")
      ->check(CLI::Range(0, 1000));
  run.add_option("--error-file", options.job.error_file,
                 "File for the first failure of a failed job, as JSON like torchrun's; default "
                 "TORCHELASTIC_ERROR_FILE");
}

void describe_preemption(CLI::App& run, RunOptions& options) {
  run.add_option(
      "--preempt-signal", options.preempt_signal,
      "Signal that, besides SIGTERM, asks the workers to write a checkpoint and end: USR1, USR2, HUP or "
      "TERM");
  run.add_option("--grace", options.grace, "Time that the workers then have before they are killed");
  run.add_option("--requeue-exit-code", options.job.preemption.clean_code,
                 "Exit code if all workers exit with 0 after such a signal, for scripts that requeue the job")
      ->check(CLI::Range(0, 255));
}

void describe_nodes(CLI::App& run, NodeOptions& options) {
  run.add_option("--nnodes", options.nodes,
                 "Number of hosts of the job: run the same command on each, with its --node-rank; -n is the "
                 "number of workers on each host");
  run.add_option("--node-rank,--node_rank", options.node_rank, "Number of this host, from 0");
  run.add_option("--rdzv,--rdzv-endpoint,--rdzv_endpoint", options.rdzv,
                 "HOST:PORT on host 0, to which the launchers of all hosts connect; port 29500 by default");
  run.add_option("--rdzv-id,--rdzv_id", options.rdzv_id,
                 "Name of the job, equal on all hosts; by default that of --rdzv");
  run.add_option("--port-range", options.port_range,
                 "FIRST-LAST: the TCP ports at which workers listen for other hosts");
}

Environment read_settings(const std::vector<std::string>& settings) {
  Environment environment;
  for (const auto& setting : settings) {
    const auto equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw_invalid("--env {}: expected NAME=VALUE", setting);
    }
    environment[setting.substr(0, equals)] = setting.substr(equals + 1);
  }
  return environment;
}

int read_preempt_signal(const std::string& text) {
  constexpr std::array<std::pair<std::string_view, int>, 4> kSignals = {
      {{"USR1", SIGUSR1}, {"USR2", SIGUSR2}, {"HUP", SIGHUP}, {"TERM", SIGTERM}}};
  const std::string_view name = text.starts_with("SIG") ? std::string_view(text).substr(3) : text;
  for (const auto& [known, signal] : kSignals) {
    if (name == known) return signal;
  }
  throw_invalid("--preempt-signal {}: expected one of USR1, USR2, HUP, TERM", text);
}

void check_error_file(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;
  if (path.empty() || folder.empty() || std::filesystem::is_directory(folder, ignored)) return;
  throw_invalid("--error-file {}: there is no folder '{}'; create it first", path, folder.string());
}

/// On several hosts, all workers start and end together, and there are as many on each.
void check_for_several_hosts(const JobOptions& job) {
  const char* option = job.restarts.most_replacements != 0 ? "--max-replacements"
                       : job.least_workers != job.workers  ? "-n MIN:MAX"
                       : job.master_port != 0              ? "--master-port"
                                                           : nullptr;
  if (option == nullptr) return;
  throw_invalid(
      "{} does not work with --nnodes: --max-restarts starts the same number of workers again on all hosts, "
      "and --rdzv names the port",
      option);
}

/// Returns the text of -n, or the number of workers of a pod of the Kubernetes Trainer.
std::string workers_text(const RunOptions& options, const Environment& environment) {
  if (!options.workers.empty()) return options.workers;
  const auto workers = environment.find("PET_NPROC_PER_NODE");
  if (workers != environment.end() && !workers->second.empty()) return workers->second;
  throw_invalid(
      "-n,--workers is required: the number of workers, or MIN:MAX; PET_NPROC_PER_NODE is not set either");
}

}  // namespace

Duration parse_duration(const std::string& text, const std::string& option) {
  constexpr std::array<std::pair<std::string_view, double>, 5> kUnits = {
      {{"", 1}, {"s", 1}, {"ms", 1e-3}, {"m", 60}, {"h", 3600}}};
  constexpr double kMost = 7 * 24 * 3600;
  double number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(result.ptr, static_cast<std::size_t>(text.data() + text.size() - result.ptr));
  for (const auto& [name, seconds] : kUnits) {
    if (result.ec != std::errc() || unit != name) continue;
    if (!(number >= 0) || number * seconds > kMost) break;
    return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(number * seconds));
  }
  throw_invalid("{} {}: expected a time such as 500ms, 30s, 2m or 1h, at most a week", option, text);
}

void describe_run_options(CLI::App& run, RunOptions& options) {
  run.add_option(
      "-n,--workers,--nproc", options.workers,
      "Number of workers, or MIN:MAX: starts with MAX; when no restart is left, continues with one worker "
      "fewer after each failure, down to MIN; default PET_NPROC_PER_NODE");
  run.add_option("--master-port", options.job.master_port, "Port of the workers' store; 0 is a free one")
      ->check(CLI::Range(0, 65535));
  run.add_option(
      "--log-dir", options.job.log_folder,
      "Folder for WORKER.out.log and WORKER.err.log, besides the output here; restarts append to them");
  run.add_option("--name-prefix", options.job.name_prefix, "Workers are named PREFIX0, PREFIX1, …");
  run.add_option("--env", options.settings, "NAME=VALUE for all workers; may be repeated")
      ->expected(1)
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  describe_restarts(run, options);
  describe_preemption(run, options);
  describe_nodes(run, options.nodes);
  describe_observation(run, options.observation);
  run.footer(
      "The exit code is that of the first worker to fail (128 + its signal), in the last attempt; 130 after "
      "Ctrl-C; 128 + the signal after a preemption, or the requeue exit code if all workers then exited with "
      "0; 2 "
      "when nothing was started; 1 when the job succeeded but its output could not be written. "
      "docs/launch.md "
      "explains restarts, signals and batch systems.");
}

JobOptions read_run_options(const RunOptions& options, const Environment& environment) {
  JobOptions job = options.job;
  const WorkerRange range = parse_workers(workers_text(options, environment), "-n");
  job.workers = range.most;
  job.least_workers = range.least;
  job.restarts.backoff = parse_duration(options.backoff, "--restart-backoff");
  job.restarts.longest_backoff = parse_duration(options.longest_backoff, "--max-backoff");
  job.preemption.grace = parse_duration(options.grace, "--grace");
  job.preemption.signal = read_preempt_signal(options.preempt_signal);
  job.environment = environment;
  job.extra = read_settings(options.settings);
  job.extra.merge(observation_variables(options.observation));
  Environment of_workers = environment;
  for (const auto& [name, value] : job.extra) of_workers[name] = value;
  job.nodes = read_node_options(options.nodes, of_workers);
  if (job.nodes.several()) check_for_several_hosts(job);
  if (const auto file = environment.find("TORCHELASTIC_ERROR_FILE");
      job.error_file.empty() && file != environment.end()) {
    job.error_file = file->second;
  } else {
    check_error_file(job.error_file);
  }
  return job;
}

}  // namespace torchspan::launch
