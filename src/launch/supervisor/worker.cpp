#include "launch/supervisor/worker.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"
#include "launch/supervisor/processes.h"

namespace torchspan::launch {
namespace {

[[noreturn]] void throw_system(const char* what) {
  throw Error(ErrorKind::kOverloaded, fmt::format("{} failed: {}; check the limits of this shell (ulimit -a)",
                                                  what, std::strerror(errno)));
}

struct Pipe {
  Descriptor read_end, write_end;
};

Pipe make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) throw_system("making a pipe");
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

/// What the new process needs; built before fork(), because allocation is not allowed between fork() and
/// exec().
struct Plan {
  const char* program;
  std::vector<char*> arguments, environment;
  int output, errors, progress, failure;
  ChildSetting setting;
  pid_t launcher;
};

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

void reset_signals() {
  for (int signal = 1; signal < NSIG; ++signal) std::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

/// Programs that use select() need the usual limit.
void restore_open_files(std::uint64_t soft) {
  rlimit limit{};
  if (soft == 0 || getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = soft;
  setrlimit(RLIMIT_NOFILE, &limit);
}

/// Runs in the new process and does not return.
[[noreturn]] void become(const Plan& plan) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.launcher) _exit(1);      // the launcher died before prctl()
  register_group(plan.setting.guard, getpid());  // here, so that no process of the group is older than this
  reset_signals();
  const int nothing = open("/dev/null", O_RDONLY);
  dup2(nothing, STDIN_FILENO);
  if (nothing > STDERR_FILENO) close(nothing);
  dup2(plan.output, STDOUT_FILENO);
  dup2(plan.errors, STDERR_FILENO);
  fcntl(plan.progress, F_SETFD, 0);
  restore_open_files(plan.setting.open_files);
  execve(plan.program, plan.arguments.data(), plan.environment.data());
  const int reason = errno;
  [[maybe_unused]] const auto written = write(plan.failure, &reason, sizeof reason);
  _exit(127);
}

void set_nonblocking(const Descriptor& descriptor) {
  fcntl(descriptor.get(), F_SETFL, fcntl(descriptor.get(), F_GETFL) | O_NONBLOCK);
}

}  // namespace

Child::Child(const std::string& program, const std::vector<std::string>& arguments,
             const Environment& environment, const ChildSetting& setting) {
  Pipe output = make_pipe(), errors = make_pipe(), progress = make_pipe(), failure = make_pipe();
  std::vector<std::string> argument_texts = arguments, environment_texts;
  for (const auto& [name, value] : environment) {
    if (name != "TORCHSPAN_PROGRESS_FD") environment_texts.push_back(name + "=" + value);
  }
  environment_texts.push_back(fmt::format("TORCHSPAN_PROGRESS_FD={}", progress.write_end.get()));
  const Plan plan{program.c_str(),
                  pointers_to(argument_texts),
                  pointers_to(environment_texts),
                  output.write_end.get(),
                  errors.write_end.get(),
                  progress.write_end.get(),
                  failure.write_end.get(),
                  setting,
                  getpid()};
  const pid_t pid = fork();
  if (pid < 0) throw_system("starting a process");
  if (pid == 0) become(plan);
  process_.pid = pid;
  process_.guard = setting.guard;
  setpgid(pid, pid);  // parent and child both call it, so that it is done whichever runs first
  failure.write_end.reset();
  int reason = 0;
  ssize_t got;
  do {
    got = read(failure.read_end.get(), &reason, sizeof reason);
  } while (got < 0 && errno == EINTR);
  if (got == sizeof reason) {
    register_group(setting.guard, -pid);
    waitpid(pid, nullptr, 0);
    process_.pid = -1;
    throw_invalid("'{}' cannot be started: {}{}", program, std::strerror(reason),
                  reason == ENOEXEC ? "; is it a program for this machine, or a script without #!?" : "");
  }
  watch_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!watch_) throw_system("watching a process");
  output_ = std::move(output.read_end);
  errors_ = std::move(errors.read_end);
  progress_ = std::move(progress.read_end);
  for (const auto* descriptor : {&output_, &errors_, &progress_}) set_nonblocking(*descriptor);
}

Child::Process::~Process() {
  if (pid < 0) return;
  kill(-pid, SIGKILL);
  register_group(guard, -pid);  // while the zombie still holds the number
  waitpid(pid, nullptr, 0);
}

std::optional<ExitStatus> Child::poll_exit() const {
  siginfo_t info{};
  if (waitid(P_PID, static_cast<id_t>(process_.pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  if (info.si_code == CLD_EXITED) return ExitStatus{info.si_status, 0};
  return ExitStatus{0, info.si_status};
}

void Child::signal_group(int signal) const {
  if (process_.pid > 0) kill(-process_.pid, signal);
}

void Child::signal_process(int signal) const {
  if (process_.pid > 0) kill(process_.pid, signal);
}

Worker::Worker(WorkerNames names, Child child, Display& display, Poller& poller)
    : names_(std::move(names)), child_(std::move(child)), display_(display), poller_(poller) {
  if (!names_.log_folder.empty()) {
    output_log_ = open_log("out");
    errors_log_ = open_log("err");
  }
  poller_.add(child_.process_descriptor(), token_of(Source::kEnd, names_.index), false);
  poller_.add(child_.output().get(), token_of(Source::kOutput, names_.index), false);
  poller_.add(child_.errors().get(), token_of(Source::kErrors, names_.index), false);
  poller_.add(child_.progress().get(), token_of(Source::kProgress, names_.index), false);
}

Worker::~Worker() {
  close_streams();
  if (!ended_) poller_.remove(child_.process_descriptor());
}

Descriptor Worker::open_log(const char* kind) const {
  const std::string path = fmt::format("{}/{}.{}.log", names_.log_folder, names_.name, kind);
  const int start = names_.append ? O_APPEND : O_TRUNC;
  Descriptor log(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | start, 0644));
  if (!log) throw_invalid("log '{}' cannot be written: {}", path, std::strerror(errno));
  return log;
}

void Worker::set_ended() {
  ended_ = true;
  poller_.remove(child_.process_descriptor());
  child_.close_process_descriptor();
}

bool Worker::silent() const { return !child_.output() && !child_.errors(); }

void Worker::write_log(Descriptor& log, std::string_view text) {
  const int reason = log ? write_all(log.get(), text) : 0;
  if (reason == 0) return;
  display_.note_lost_log(
      fmt::format("a log in '{}' is not complete: {}", names_.log_folder, std::strerror(reason)));
  log.reset();
}

void Worker::read_into(Descriptor& descriptor, Descriptor& log, LineSplitter& lines,
                       const LineSplitter::Take& take) {
  std::array<char, 65536> bytes;
  if (!descriptor) return;
  const auto got = read(descriptor.get(), bytes.data(), bytes.size());
  if (got > 0) {
    const std::string_view text(bytes.data(), static_cast<std::size_t>(got));
    write_log(log, text);
    lines.feed(text, take);
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    lines.finish(take);
    poller_.remove(descriptor.get());
    descriptor.reset();
    log.reset();
  }
}

void Worker::read_output() {
  read_into(child_.output(), output_log_, output_,
            [this](std::string_view line) { display_.print_output(names_.prefix, line); });
}

void Worker::read_errors() {
  read_into(child_.errors(), errors_log_, errors_, [this](std::string_view line) {
    display_.print_error(names_.prefix, line);
    words_.add(line);
    recent_.add(line);
  });
}

void Worker::read_progress(const LineSplitter::Take& take) {
  Descriptor no_log;
  read_into(child_.progress(), no_log, progress_, take);
}

void Worker::close_streams() {
  for (auto* stream : {&child_.output(), &child_.errors(), &child_.progress()}) {
    if (*stream) poller_.remove(stream->get());
    stream->reset();
  }
  output_log_.reset();
  errors_log_.reset();
}

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
