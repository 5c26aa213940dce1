#include "launch/supervisor/host_watch.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <fmt/format.h>
#include <unistd.h>
#include <utility>

#include "core/api/text_server.h"
#include "launch/supervisor/host_link.h"
#include "launch/watch/job_sockets.h"

namespace torchspan::launch {
namespace {

/// How long workers have to answer, and how long other launchers have.
constexpr Duration kWorkerLimit = std::chrono::seconds(2);
constexpr Duration kLeastLimit = std::chrono::milliseconds(500);
constexpr Duration kHostsLimit = std::chrono::seconds(3);
constexpr Duration kBriefLimit = std::chrono::milliseconds(500);
/// All ranks of an operation time out at almost the same time.
constexpr Duration kNoticesSpread = std::chrono::milliseconds(100);
/// How long an incident counts as the same on all hosts.
constexpr Duration kSameIncident = std::chrono::seconds(30);
/// How long the answers of workers for an incident count as their state.
constexpr Duration kFresh = std::chrono::seconds(5);
constexpr Duration kBetweenTries = std::chrono::milliseconds(20);

std::string own_host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::string job_folder(const JobSetting& setting) {
  return std::filesystem::path(setting.runtime_folder).parent_path().string();
}

}  // namespace

HostWatch::HostWatch(const AttemptContext& context, const JobSetting& setting)
    : context_(context),
      setting_(setting),
      host_(own_host_name()),
      server_poller_(context.executor.make_poller()) {
  server_ = context_.executor.spawn("torchspan.hosts", [this] { serve(); });
  context_.link->answers().set_describe(
      [this](bool brief, const std::atomic<bool>& stopping) { return describe(brief, stopping); });
}

HostWatch::~HostWatch() {
  stopping_ = true;
  context_.link->answers().set_describe({});
  server_poller_->wake();
  server_.join();
  collector_.join();
}

JobReport HostWatch::job_report(std::vector<HostReport> others) const {
  return {.node = setting_.nodes.node_rank,
          .host = host_,
          .workers = setting_.workers,
          .prefix = context_.options.name_prefix,
          .others = std::move(others)};
}

void HostWatch::begin() {
  collector_.join();
  waiting_ = true;
  {
    MutexLock lock(mutex_);
    examining_ = true;
    others_.clear();
  }
  collector_ = context_.executor.spawn("torchspan.ask", [this] { collect(); });
}

/// Asks for the workers at once, and a little later whether others write a page for the same incident.
void HostWatch::collect() {
  Executor& executor = context_.executor;
  const Deadline notices_end = executor.deadline_in(kNoticesSpread);
  std::vector<HostReport> others =
      context_.link->collect(false, executor.deadline_in(kHostsLimit), stopping_);
  while (!stopping_ && !notices_end.passed(executor.now())) executor.sleep(kBetweenTries);
  std::vector<HostReport> later = context_.link->collect(true, executor.deadline_in(kBriefLimit), stopping_);
  for (std::size_t i = 0; i < others.size(); ++i) {
    if (!later[i].trouble.empty() || !others[i].trouble.empty()) continue;
    others[i].notices = std::move(later[i].notices);
    others[i].page = std::move(later[i].page);
    others[i].written = later[i].written;
  }
  {
    MutexLock lock(mutex_);
    others_ = std::move(others);
  }
  waiting_ = false;
  context_.poller.wake();
}

JobReport HostWatch::take() {
  {
    MutexLock lock(mutex_);
    if (!waiting_ && !others_.empty()) return job_report(std::exchange(others_, {}));
  }
  std::vector<HostReport> others;
  for (int node = 0; node < setting_.nodes.count; ++node) {
    if (node == setting_.nodes.node_rank) continue;
    others.push_back({.node = node,
                      .host = "",
                      .trouble = "its launcher had not answered when the attempt ended here",
                      .workers = {}});
  }
  return job_report(std::move(others));
}

void HostWatch::set_incident(const Incident& incident, bool written) {
  MutexLock lock(mutex_);
  told_ = Told{incident, written, context_.executor.now()};
}

void HostWatch::set_workers(std::vector<WorkerReport> workers) {
  MutexLock lock(mutex_);
  examining_ = false;
  workers_ = std::move(workers);
  workers_at_ = context_.executor.now();
}

HostReport HostWatch::describe(bool brief, const std::atomic<bool>& stopping) {
  HostReport report{.node = setting_.nodes.node_rank, .host = host_, .trouble = "", .workers = {}};
  if (!brief) report.workers = describe_workers(stopping);
  MutexLock lock(mutex_);
  if (told_ && context_.executor.now() - told_->at < kSameIncident) {
    report.notices = told_->incident.notices;
    report.page = told_->incident.page;
    report.written = told_->written;
  }
  return report;
}

/// Asks the workers; not those that are being asked for an incident, and may end because of it.
std::vector<WorkerReport> HostWatch::describe_workers(const std::atomic<bool>& stopping) {
  Executor& executor = context_.executor;
  const Deadline until = executor.deadline_in(kWorkerLimit);
  for (; !stopping && !until.passed(executor.now()); executor.sleep(kBetweenTries)) {
    MutexLock lock(mutex_);
    if (examining_) continue;
    if (!workers_.empty() && executor.now() - workers_at_ < kFresh) return workers_;
    break;
  }
  try {
    const Duration limit = std::max(until.left(executor.now()), kLeastLimit);
    return ask_workers(executor, setting_.runtime_folder, limit, &stopping);
  } catch (const Error&) {
    return {};  // no worker has joined
  }
}

/// Answers `torchspan stacks` and `torchspan top`.
void HostWatch::serve() {
  Executor& executor = context_.executor;
  Descriptor listener;
  try {
    listener = listen_on_path(launcher_socket(job_folder(setting_)));
  } catch (const Error&) {
    return;  // they show the workers of this host
  }
  TextServer server(
      executor, *server_poller_, std::move(listener), 0, [this, &executor](const std::string& path) {
        if (path != "/hosts") return TextReply{.status = 404, .body = "no such page\n"};
        return TextReply{.type = "application/json",
                         .body = encode_job_report(job_report(
                             context_.link->collect(false, executor.deadline_in(kHostsLimit), stopping_)))};
      });
  while (!stopping_) {
    std::array<Poller::Event, 16> events;
    const std::size_t count = server_poller_->wait(events, server.next_deadline());
    for (std::size_t i = 0; i < count && !stopping_; ++i) server.handle(events[i]);
    server.advance();
  }
}

}  // namespace torchspan::launch
