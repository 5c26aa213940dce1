#include "launch/supervisor/processes.h"

#include <algorithm>
#include <charconv>
#include <csignal>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <unistd.h>

namespace torchspan::launch {
namespace {

std::optional<pid_t> process_of(const std::filesystem::path& folder) {
  const std::string name = folder.filename().string();
  pid_t pid = 0;
  const auto result = std::from_chars(name.data(), name.data() + name.size(), pid);
  if (result.ec != std::errc() || result.ptr != name.data() + name.size()) return std::nullopt;
  return pid;
}

}  // namespace

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
    const auto pid = process_of(entry.path());
    if (!pid || *pid == getpid()) continue;
    std::ifstream stream(entry.path() / "environ", std::ios::binary);
    const std::string block{std::istreambuf_iterator<char>(stream), {}};
    if (is_marked(block, job)) found.push_back(*pid);
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

}  // namespace torchspan::launch
