#include "launch/supervisor/processes.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <exception>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <set>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/api/parse_number.h"
#include "core/api/system_files.h"

namespace torchspan::launch {
namespace {}  // namespace

bool is_marked(std::string_view block, std::string_view job) {
  const std::string name = std::string(kJobsVariable) + "=";
  while (!block.empty()) {
    std::string_view entry = block.substr(0, block.find('\0'));
    block.remove_prefix(std::min(block.size(), entry.size() + 1));
    if (!entry.starts_with(name)) continue;
    entry.remove_prefix(name.size());
    while (!entry.empty()) {
      const std::string_view id = entry.substr(0, entry.find(':'));
      if (id == job) return true;
      entry.remove_prefix(std::min(entry.size(), id.size() + 1));
    }
  }
  return false;
}

std::vector<pid_t> processes_of(std::string_view job) {
  std::vector<pid_t> found;
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", failure)) {
    const auto pid = parse_number<pid_t>(entry.path().filename().string());
    if (!pid || *pid == getpid()) continue;
    if (is_marked(read_system_file(entry.path() / "environ"), job)) found.push_back(*pid);
  }
  return found;
}

std::size_t kill_processes_of(Executor& executor, std::string_view job) {
  constexpr Duration kPause = std::chrono::milliseconds(2);
  constexpr int kMostScans = 1000;
  // A process has no environment for a moment while it executes another program, so one empty scan is not
  // enough.
  constexpr int kEmptyScans = 2;
  const Deadline end = executor.deadline_in(std::chrono::seconds(2));
  std::size_t left = 0;
  for (int scan = 0, empty = 0; scan < kMostScans && empty < kEmptyScans; ++scan) {
    const auto found = processes_of(job);
    for (const pid_t pid : found) kill(pid, SIGKILL);
    left = found.size();
    empty = found.empty() ? empty + 1 : 0;
    if (end.passed(executor.now())) break;
    if (empty < kEmptyScans) executor.sleep(kPause);
  }
  return left;
}

ProcessCleanup::~ProcessCleanup() {
  try {
    kill_processes_of(executor_, job_);
  } catch (const std::exception&) {
    return;  // /proc cannot be read, so these processes cannot be found
  }
}

namespace {

/// Closes all descriptors except these two, and gives the standard ones to /dev/null.
void close_all_except(int one, int other) {
  const auto low = static_cast<unsigned>(std::min(one, other)),
             high = static_cast<unsigned>(std::max(one, other));
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (standard != one && standard != other) dup2(nothing, standard);
  }
  const auto close_from_to = [](unsigned first, unsigned last) {
    if (first <= last) syscall(SYS_close_range, first, last, 0u);
  };
  close_from_to(3, low - 1);
  close_from_to(std::max(3u, low + 1), high - 1);
  close_from_to(std::max(3u, high + 1), ~0u);
}

/// The groups that workers have registered.
class Groups {
 public:
  explicit Groups(int descriptor) : descriptor_(descriptor) {}

  /// Reads what is there; returns false at the end of the pipe.
  bool read_some() {
    std::array<pid_t, 1024> numbers;
    ssize_t got;
    while ((got = read(descriptor_, numbers.data(), sizeof numbers)) > 0) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(got) / sizeof(pid_t); ++i) {
        if (numbers[i] > 0) groups_.insert(numbers[i]);
        if (numbers[i] < 0) groups_.erase(-numbers[i]);
      }
    }
    return got != 0;
  }
  void kill_all() const {
    for (const pid_t group : groups_) kill(-group, SIGKILL);
  }

 private:
  const int descriptor_;
  std::set<pid_t> groups_;
};

/// Runs in the guard's process: waits for the launcher's end, then kills.
[[noreturn]] void watch(int launcher, int registrations, const std::string& job) {
  constexpr std::uint64_t kLauncher = 0, kRegistrations = 1;
  const auto executor = make_executor();
  const auto poller = executor->make_poller();
  Groups groups(registrations);
  poller->add(launcher, kLauncher, false);
  poller->add(registrations, kRegistrations, false);
  std::array<Poller::Event, 2> events;
  // The launcher's end is reported after its children have got SIGKILL: none of them starts a process later.
  for (bool running = true; running;) {
    const std::size_t count = poller->wait(events, Deadline::never());
    for (std::size_t i = 0; i < count; ++i) {
      if (events[i].token == kLauncher) running = false;
      if (events[i].token == kRegistrations && !groups.read_some()) poller->remove(registrations);
    }
  }
  groups.read_some();
  groups.kill_all();
  kill_processes_of(*executor, job);
  _exit(0);
}

}  // namespace

Guard::Guard(const std::string& job) {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) != 0) return;
  const Descriptor read_end(ends[0]);
  registrations_ = Descriptor(ends[1]);
  const Descriptor launcher(static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)));
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  if (launcher) pid_ = fork();
  if (pid_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_NAME, "ts-guard");
    close_all_except(launcher.get(), read_end.get());
    watch(launcher.get(), read_end.get(), job);
  }
  if (pid_ > 0)
    setpgid(pid_, pid_);  // parent and child both call it, so that it is done before any worker starts
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid_ < 0) registrations_.reset();
}

Guard::~Guard() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void register_group(int registrations, pid_t group) {
  if (registrations < 0) return;
  [[maybe_unused]] const auto written = write(registrations, &group, sizeof group);
}

}  // namespace torchspan::launch
