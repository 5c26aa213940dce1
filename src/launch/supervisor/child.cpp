#include "launch/supervisor/child.h"

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

#include "launch/supervisor/guard.h"

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
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("'{}' cannot be started: {}{}", program, std::strerror(reason),
                    reason == ENOEXEC ? "; is it a program for this machine, or a script without #!?" : ""));
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

}  // namespace torchspan::launch
