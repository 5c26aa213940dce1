#include "launch/watch/running_job.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <sys/syscall.h>
#include <unistd.h>

#include "launch/watch/job_sockets.h"

namespace torchspan::launch {
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
