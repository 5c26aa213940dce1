#include "launch/watch/running_job.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"
#include "core/api/parse_number.h"
#include "core/api/system_files.h"
#include "core/api/throw_invalid.h"
#include "launch/display/lines.h"
#include "launch/watch/host_report.h"
#include "rendezvous/api/process_stat.h"

namespace torchspan::launch {

LocalRequest::LocalRequest(const std::string& socket_path, const std::string& path)
    : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket_path.copy(static_cast<char*>(address.sun_path), sizeof address.sun_path - 1);
  const std::string request = fmt::format("GET {} HTTP/1.0\r\n\r\n", path);
  over_ = !socket_ ||
          connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
          send(socket_.get(), request.data(), request.size(), MSG_NOSIGNAL) != std::ssize(request);
  ucred peer{};
  socklen_t size = sizeof peer;
  if (socket_ && getsockopt(socket_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) process_ = peer.pid;
}

void LocalRequest::read() {
  constexpr std::size_t kLongest = std::size_t{64} << 20;
  std::array<char, 65536> place;
  for (;;) {
    const ssize_t size = recv(socket_.get(), place.data(), place.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0 || answer_.size() > kLongest) {
      over_ = true;
      return;
    }
    answer_.append(place.data(), static_cast<std::size_t>(size));
  }
}

std::string_view LocalRequest::body() const {
  const auto head_end = answer_.find("\r\n\r\n");
  if (!over_ || head_end == std::string::npos) return {};
  return std::string_view(answer_).substr(head_end + 4);
}

namespace {

/// The rank in the name of a worker's socket; nullopt for other names.
std::optional<int> rank_of_socket(std::string_view name) {
  constexpr std::string_view kPrefix = "observe.";
  return name.starts_with(kPrefix) ? parse_number<int>(name.substr(kPrefix.size())) : std::nullopt;
}

/// The state of a process, as /proc writes it; X if there is none.
char state_of_process(std::int64_t process) {
  return rendezvous::read_process_stat(process).value_or(rendezvous::ProcessStat{.state = 'X'}).state;
}

}  // namespace

StateQuestions::~StateQuestions() {
  for (const auto& [rank, question] : questions_) {
    if (!question.request.over()) poller_.remove(question.request.descriptor());
  }
}

std::size_t StateQuestions::ask(const std::string& folder, const std::string& path) {
  for (auto& [rank, question] : questions_) question.asked = false;
  std::error_code failure;
  std::filesystem::recursive_directory_iterator entry(folder, failure), end;
  while (!failure && entry != end) {
    if (const auto rank = rank_of_socket(entry->path().filename().string())) {
      auto found = questions_.find(*rank);
      if (found == questions_.end() || found->second.request.over()) {
        found =
            questions_.insert_or_assign(*rank, Question{LocalRequest(entry->path().string(), path)}).first;
        const LocalRequest& request = found->second.request;
        if (!request.over()) {
          poller_.add(request.descriptor(), first_token_ + static_cast<std::uint64_t>(*rank), false);
        }
      }
      found->second.asked = true;
    }
    entry.increment(failure);
  }
  std::erase_if(questions_,
                [](const auto& entry) { return entry.second.request.over() && !entry.second.asked; });
  return questions_.size();
}

void StateQuestions::handle(const Poller::Event& event) {
  const auto found = questions_.find(static_cast<int>(event.token - first_token_));
  if (found == questions_.end() || found->second.request.over()) return;  // an event of an earlier question
  LocalRequest& request = found->second.request;
  request.read();
  if (request.over()) poller_.remove(request.descriptor());
}

bool StateQuestions::waiting() const {
  return std::any_of(questions_.begin(), questions_.end(),
                     [](const auto& entry) { return !entry.second.request.over(); });
}

WorkerReport StateQuestions::report_of(int rank, const Question& question) {
  WorkerReport report;
  try {
    report = decode_worker_report(question.request.body());
  } catch (const Error&) {
    report.answers = false;
    report.name = fmt::format("worker of rank {}", rank);
  }
  report.rank = rank;
  if (report.process == 0) report.process = question.request.process();
  report.process_state = state_of_process(report.process);
  return report;
}

std::vector<WorkerReport> StateQuestions::reports() const {
  std::vector<WorkerReport> reports;
  for (const auto& [rank, question] : questions_) reports.push_back(report_of(rank, question));
  return reports;
}

namespace {

/// Whether a launcher holds the folder's lock.
bool is_running(const std::string& path) {
  const Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return folder && flock(folder.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

/// The folders that contain folders of jobs, each once: TMPDIR may be another name of /tmp.
std::vector<std::string> parents_of_jobs(const rendezvous::Environment& environment) {
  std::vector<std::string> parents;
  std::set<std::filesystem::path> known;
  const auto add = [&](const std::string& parent) {
    std::error_code failure;
    const auto path = std::filesystem::canonical(parent, failure);
    if (!failure && known.insert(path).second) parents.push_back(parent);
  };
  add("/tmp");
  for (const char* name : {"XDG_RUNTIME_DIR", "TMPDIR"}) {
    const auto found = environment.find(name);
    if (found != environment.end() && !found->second.empty()) add(found->second);
  }
  return parents;
}

std::vector<std::string> running_jobs(const rendezvous::Environment& environment) {
  std::vector<std::string> jobs;
  for (const std::string& parent : parents_of_jobs(environment)) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
      const std::string path = entry.path().string();
      if (is_job_name(entry.path().filename().string()) && is_running(path)) jobs.push_back(path);
    }
  }
  return jobs;
}

/// The command line of a process, with spaces between its arguments; empty if it cannot be read.
std::string command_of(const std::string& process) {
  std::string command = read_system_file("/proc/" + process + "/cmdline");
  while (!command.empty() && command.back() == '\0') command.pop_back();
  return without_controls(command);
}

/// A line for each job: its folder, its launcher's process and command.
std::string list_jobs(const std::vector<std::string>& jobs) {
  std::string text;
  for (const std::string& path : jobs) {
    const std::string process = launcher_of(path);
    text += "\n  " + path;
    if (!process.empty()) text += fmt::format(", process {}: {}", process, command_of(process));
  }
  return text;
}

/// Asks the launcher of this host for the workers of the other hosts; nullopt if it does not answer.
std::optional<JobReport> ask_launcher(Executor& executor, const std::string& socket) {
  constexpr Duration kLimit = std::chrono::seconds(6);  // it waits for the other hosts
  LocalRequest request(socket, "/hosts");
  const auto poller = executor.make_poller();
  const Deadline until = executor.deadline_in(kLimit);
  if (!request.over()) poller->add(request.descriptor(), 0, false);
  while (!request.over() && !until.passed(executor.now())) {
    std::array<Poller::Event, 1> events;
    if (poller->wait(events, until) > 0) request.read();
  }
  return decode_job_report(request.body());
}

/// The value of a variable in an environment block, whose entries end with a zero byte.
std::string value_in(const std::string& block, const std::string& name) {
  std::istringstream entries(block);
  for (std::string entry; std::getline(entries, entry, '\0');) {
    if (entry.starts_with(name + "=")) return entry.substr(name.size() + 1);
  }
  return "";
}

/// Adds the workers that were stopped before they joined: nothing else shows them. `folder` contains the job's sockets.
void add_stopped(const std::string& folder, std::vector<WorkerReport>& workers) {
  std::error_code failure, ignored;
  const std::string job = std::filesystem::weakly_canonical(folder, ignored).string();
  for (const auto& entry : std::filesystem::directory_iterator("/proc", failure)) {
    const std::string name = entry.path().filename().string();
    const auto process = parse_number<std::int64_t>(name);
    if (!process) continue;
    WorkerReport stopped;
    stopped.process = *process;
    stopped.process_state = state_of_process(stopped.process);
    if (stopped.process_state != 'T' && stopped.process_state != 't') continue;
    const std::string block = read_system_file(entry.path() / "environ");
    const auto rank = parse_number<int>(value_in(block, "RANK"));
    const auto its_job = std::filesystem::weakly_canonical(value_in(block, "TORCHSPAN_RUNTIME_DIR"), ignored);
    if (!its_job.string().starts_with(job) || !rank) continue;
    stopped.rank = *rank;
    if (std::ranges::find(workers, stopped.rank, &WorkerReport::rank) != workers.end()) continue;
    stopped.name = without_controls(value_in(block, "TORCHSPAN_NAME"));
    if (stopped.name.empty()) stopped.name = fmt::format("worker of rank {}", stopped.rank);
    stopped.answers = false;
    workers.push_back(std::move(stopped));
  }
  std::ranges::sort(workers, {}, &WorkerReport::rank);
}

/// Throws unless this user may see the job in `path`.
void check_access(const std::string& path) {
  struct stat about {};
  if (::access(path.c_str(), R_OK | X_OK) == 0 || errno != EACCES || ::stat(path.c_str(), &about) != 0)
    return;
  throw_invalid(
      "the job in '{}' belongs to user {}, and this command runs as user {}: run it as that user, or as root",
      path, about.st_uid, ::geteuid());
}

}  // namespace

bool is_job_name(const std::string& name) { return name.starts_with(kJobPrefix); }

// The format is that of proc_locks(5).
std::string launcher_of(const std::string& path) {
  struct stat about {};
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::canonical(path, ignored);
  if (ignored || stat(path.c_str(), &about) != 0) return "";
  const std::string inode = fmt::format(":{}", about.st_ino);
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream words(line);
    std::string number, kind, advisory, access, process, file;
    words >> number >> kind >> advisory >> access >> process >> file;
    if (kind != "FLOCK" || access != "WRITE" || !file.ends_with(inode)) continue;
    std::filesystem::directory_iterator entry("/proc/" + process + "/fd", ignored), end;
    for (; entry != end && !ignored; entry.increment(ignored)) {  // fails if the process ends meanwhile
      std::error_code closed;
      if (std::filesystem::read_symlink(entry->path(), closed) == folder) return process;
    }
    ignored.clear();
  }
  return "";
}

std::string find_job(const std::string& job, const rendezvous::Environment& environment) {
  std::error_code ignored;
  if (!job.empty() && std::filesystem::is_directory(job, ignored)) {
    check_access(job);
    return job;
  }
  std::vector<std::string> jobs = running_jobs(environment);
  if (jobs.empty()) throw_invalid("no job of 'torchspan run' runs on this host under this user");
  const std::vector<std::string> all = jobs;
  if (!job.empty()) std::erase_if(jobs, [&](const std::string& path) { return !path.ends_with(job); });
  if (jobs.size() == 1) return jobs.front();
  if (jobs.empty()) throw_invalid("there is no job '{}'; these run here:{}", job, list_jobs(all));
  throw_invalid("several jobs run here; name one of these folders:{}", list_jobs(jobs));
}

std::vector<WorkerReport> ask_workers(Executor& executor, const std::string& folder, Duration timeout,
                                      const std::atomic<bool>* stopping) {
  constexpr Duration kLook = std::chrono::milliseconds(50);
  const auto poller = executor.make_poller();
  StateQuestions questions(*poller, 0);
  if (questions.ask(folder, "/state") == 0) {
    std::vector<WorkerReport> stopped;
    add_stopped(folder, stopped);
    if (!stopped.empty()) return stopped;
    throw_invalid(
        "no worker of the job in '{}' can be asked: its workers have not joined yet, or the job has ended",
        folder);
  }
  const Deadline until = executor.deadline_in(timeout);
  while (questions.waiting() && !until.passed(executor.now()) && (stopping == nullptr || !*stopping)) {
    std::array<Poller::Event, 64> events;
    const Deadline next = stopping == nullptr ? until : earlier(until, executor.deadline_in(kLook));
    const std::size_t count = poller->wait(events, next);
    for (std::size_t i = 0; i < count; ++i) questions.handle(events[i]);
  }
  std::vector<WorkerReport> reports = questions.reports();
  add_stopped(folder, reports);
  return reports;
}

std::string launcher_socket(const std::string& folder) { return folder + "/run/hosts"; }

JobState ask_job(Executor& executor, const std::string& folder, Duration timeout) {
  std::error_code ignored;
  const std::string socket = launcher_socket(folder);
  if (!std::filesystem::exists(socket, ignored)) return {ask_workers(executor, folder, timeout), ""};
  const auto job = ask_launcher(executor, socket);
  constexpr const char* kSilent =
      "the launcher of this host does not answer, so the workers of other hosts are not shown";
  std::vector<WorkerReport> mine;
  try {
    mine = ask_workers(executor, folder, timeout);
  } catch (const Error& error) {
    if (!job) throw Error(error.kind(), fmt::format("{}; {}", error.message(), kSilent));
    if (error.kind() != ErrorKind::kInvalid) throw;  // else no worker of this host has joined
  }
  if (!job) return {std::move(mine), kSilent};
  return {merge_hosts(std::move(mine), *job), ""};
}

namespace {

/// The absolute path of a folder, without a slash at its end, so that its parent folder can be searched.
std::string absolute_folder(const std::string& folder) {
  std::error_code failure;
  const std::filesystem::path absolute = std::filesystem::absolute(folder, failure);
  std::string path = (failure ? std::filesystem::path(folder) : absolute).lexically_normal().string();
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

}  // namespace

RunningJob::RunningJob(Executor& executor, const std::string& folder)
    : executor_(executor), folder_(absolute_folder(folder)), launcher_(launcher_of(folder_)) {
  if (launcher_.empty()) return;
  process_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, std::atoi(launcher_.c_str()), 0)));
}

bool RunningJob::has_ended() const {
  if (!process_) return true;
  const auto poller = executor_.make_poller();
  std::array<Poller::Event, 1> events;
  poller->add(process_.get(), 0, false);
  return poller->wait(events, Deadline(executor_.now())) > 0;
}

bool RunningJob::follow() {
  if (has_ended()) return false;
  const std::string parent = std::filesystem::path(folder_).parent_path().string();
  std::error_code failure;
  std::filesystem::directory_iterator entry(parent, failure), end;
  for (; !failure && entry != end; entry.increment(failure)) {
    const std::string path = entry->path().string();
    if (!is_job_name(entry->path().filename().string()) || launcher_of(path) != launcher_) continue;
    folder_ = path;
    break;
  }
  return true;
}

}  // namespace torchspan::launch
