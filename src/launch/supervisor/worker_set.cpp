#include "launch/supervisor/worker_set.h"

#include <algorithm>
#include <csignal>

#include "launch/supervisor/processes.h"

namespace torchspan::launch {

void WorkerSet::start(int rank, int incarnation) {
  const JobOptions& options = context_.options;
  const std::string name = options.name_prefix + std::to_string(setting_.rank_of(rank));
  const WorkerNames names{.rank = rank,
                          .incarnation = incarnation,
                          .index = static_cast<std::uint32_t>(all_.size()),
                          .name = name,
                          .prefix = prefix_of(name, rank, options.display.colours),
                          .log_folder = options.log_folder,
                          .append = setting_.restart_count > 0 || incarnation > 0,
                          .began = context_.executor.now()};
  Child child(context_.program, options.command,
              worker_environment(options.environment, setting_, rank, incarnation),
              {.guard = context_.guard, .open_files = options.open_files});
  all_.push_back(std::make_unique<Worker>(names, std::move(child), context_.display, context_.poller));
}

const Worker* WorkerSet::find(long pid) const {
  const auto found = std::find_if(all_.begin(), all_.end(),
                                  [&](const auto& worker) { return worker->child().pid() == pid; });
  return found == all_.end() ? nullptr : found->get();
}

bool WorkerSet::silent() const {
  return std::all_of(all_.begin(), all_.end(), [](const auto& worker) { return worker->silent(); });
}

void WorkerSet::kill_running() const {
  for (const auto& worker : all_) {
    if (!worker->ended()) worker->child().signal_group(SIGKILL);
  }
}

void WorkerSet::kill_leftovers(bool close) const {
  for (const auto& worker : all_) {
    worker->child().signal_group(SIGKILL);
    if (close) worker->close_streams();
  }
  kill_processes_of(context_.executor, setting_.run_id);
}

void WorkerSet::kill_leftovers_of(const Worker& worker) const {
  worker.child().signal_group(SIGKILL);
  kill_processes_of(context_.executor, mark_of(setting_, worker.rank()));
}

}  // namespace torchspan::launch
