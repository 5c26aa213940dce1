#include "launch/supervisor/job_watch.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <numeric>
#include <unistd.h>
#include <utility>

#include "core/api/text_server.h"
#include "launch/supervisor/host_link.h"
#include "launch/watch/activity.h"
#include "launch/watch/running_job.h"

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
  published_ = PublishedIncident{incident, written, context_.executor.now()};
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
  if (published_ && context_.executor.now() - published_->at < kSameIncident) {
    report.notices = published_->incident.notices;
    report.page = published_->incident.page;
    report.written = published_->written;
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

namespace {

constexpr Duration kSample = std::chrono::milliseconds(500);
constexpr Duration kSampleLimit = std::chrono::milliseconds(400);
/// How long workers have to answer for a page.
constexpr Duration kPageLimit = std::chrono::seconds(5);
/// How long an incident collects the notices of other workers: all ranks of a group time out at almost the same time.
constexpr Duration kCollect = std::chrono::milliseconds(100);
constexpr Duration kBetweenPages = std::chrono::seconds(30);
constexpr std::size_t kMostPages = 5;

std::string variable_of(const Environment& environment, const char* name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

/// Creates a file that only this user can read. Returns false and sets errno if that fails.
bool write_private(const std::string& path, const std::string& text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  return file && write(file.get(), text.data(), text.size()) == std::ssize(text);
}

}  // namespace

JobWatch::JobWatch(const AttemptContext& context, const JobSetting& setting, ProgressView& view)
    : context_(context),
      setting_(setting),
      view_(view),
      questions_(context.poller, token_of(Source::kState, 0)) {
  if (context_.link != nullptr) hosts_ = std::make_unique<HostWatch>(context_, setting_);
  if (view_.is_live()) next_round_ = context_.executor.deadline_in(kSample);
}

void JobWatch::on_timeout(int rank, const TimeoutNotice& notice) {
  const TimePoint now = context_.executor.now();
  if (wanted_ || examining_) {
    incidents_.back().notices.emplace_back(rank, notice);
    if (hosts_) hosts_->set_incident(incidents_.back(), false);
    return;
  }
  if (incidents_.size() >= kMostPages || (!incidents_.empty() && now - examined_at_ < kBetweenPages)) {
    return add_to_last_page(rank, notice);
  }
  incidents_.push_back({{{rank, notice}}, "", ""});
  incidents_.back().page = page_path();
  if (hosts_) hosts_->set_incident(incidents_.back(), false);
  wanted_ = true;
  next_round_ = Deadline(now);
  round_end_ = Deadline(now);  // a sample for the live block would contain less
}

void JobWatch::begin_round(TimePoint now) {
  next_round_ = view_.is_live() ? Deadline(now + kSample) : Deadline::never();
  examining_ = std::exchange(wanted_, false);
  const bool any = questions_.ask(setting_.runtime_folder, examining_ ? "/state" : "/activity") > 0;
  if (!any && !examining_) return;
  if (examining_ && hosts_) hosts_->begin();
  asking_ = true;
  round_end_ = Deadline(now + (examining_ ? kPageLimit : kSampleLimit));
  notices_end_ = examining_ ? Deadline(now + kCollect) : Deadline::never();
}

void JobWatch::end_round(TimePoint now) {
  asking_ = read_last_ = false;
  round_end_ = notices_end_ = Deadline::never();
  std::vector<WorkerReport> workers = questions_.reports();
  for (WorkerReport& worker : workers) {
    if (!worker.answers) worker.name = fmt::format("{}{}", context_.options.name_prefix, worker.rank);
  }
  if (view_.is_live()) view_.set_activities(find_activities(workers));
  if (!std::exchange(examining_, false)) return;
  examined_at_ = now;
  write_page(add_hosts(std::move(workers)));
}

void JobWatch::add_to_last_page(int rank, const TimeoutNotice& notice) {
  constexpr std::size_t kMostNotices = 200;
  Incident& incident = incidents_.back();
  if (incident.page.empty() || !incident.page_host.empty() || incident.notices.size() >= kMostNotices) return;
  incident.notices.emplace_back(rank, notice);
  const std::string line = fmt::format("later: {}\n", describe_notice(rank, notice));
  const Descriptor file(open(incident.page.c_str(), O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC));
  [[maybe_unused]] const auto written = write(file.get(), line.data(), line.size());
}

void JobWatch::advance(TimePoint now) {
  if (asking_) {
    const bool complete =
        !questions_.waiting() && (!examining_ || (notices_end_.passed(now) && !hosts_wait()));
    if (complete || round_end_.passed(now)) {
      // What a worker reported before it answered or died is in its pipe: handle that first, or a worker that ended
      // because of its own timeout looks like the cause.
      if (examining_ && !std::exchange(read_last_, true)) return;
      end_round(now);
    }
  }
  if (!asking_ && next_round_.passed(now)) begin_round(now);
}

void JobWatch::finish() {
  if (wanted_) begin_round(context_.executor.now());
  if (examining_) end_round(context_.executor.now());
}

Deadline JobWatch::next() const {
  if (!asking_) return next_round_;
  return questions_.waiting() || !examining_ || hosts_wait() ? round_end_ : notices_end_;
}

std::vector<WorkerReport> JobWatch::add_hosts(std::vector<WorkerReport> workers) {
  if (!hosts_) return workers;
  hosts_->set_workers(workers);
  Incident& incident = incidents_.back();
  const JobReport job = hosts_->take();
  for (const HostReport& other : job.others) {
    incident.notices.insert(incident.notices.end(), other.notices.begin(), other.notices.end());
    // The first host whose launcher knew of the incident writes the page; of several, the one with the lowest number.
    const bool writes = !other.page.empty() && (other.written || other.node < job.node);
    if (!writes || !incident.page_host.empty()) continue;
    incident.page = other.page;
    incident.page_host = name_of_host(other.node, other.host);
  }
  Incident told = incident;
  if (!incident.page_host.empty()) told.page.clear();
  hosts_->set_incident(told, false);
  return merge_hosts(std::move(workers), job);
}

/// Beside the logs, else in the folder for temporary files: the job's folder ends with the job.
std::string JobWatch::page_path() const {
  std::string folder = context_.options.log_folder;
  if (folder.empty()) folder = variable_of(context_.options.environment, "TMPDIR");
  if (folder.empty()) folder = "/tmp";
  return fmt::format("{}/torchspan-stacks-{}-{}-{}.txt", folder, setting_.run_id, setting_.restart_count,
                     incidents_.size());
}

void JobWatch::write_page(std::vector<WorkerReport> workers) {
  Incident& incident = incidents_.back();
  std::vector<int> ranks(static_cast<std::size_t>(setting_.workers));
  std::iota(ranks.begin(), ranks.end(), setting_.rank_of(0));
  const std::string page =
      describe_incident(incident, context_.options.name_prefix, std::move(workers), ranks);
  if (incident.page_host.empty() && !write_private(incident.page, page)) {
    context_.display.say(
        fmt::format("torchspan: '{}' cannot be written: {}\n", incident.page, std::strerror(errno)));
    incident.page.clear();
  }
  if (hosts_ && incident.page_host.empty()) hosts_->set_incident(incident, true);
  context_.display.say(
      fmt::format("torchspan: {}{}{}\n", incident.headline(),
                  incident.suspect.empty() ? "" : fmt::format("; probable cause: {}", incident.suspect),
                  incident.page.empty() ? "" : fmt::format("; all workers: {}", incident.place())));
}

}  // namespace torchspan::launch
