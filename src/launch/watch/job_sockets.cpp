#include "launch/watch/job_sockets.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {
namespace {

constexpr std::string_view kJobPrefix = "torchspan.";
constexpr std::string_view kSocketPrefix = "observe.";

/// Whether a launcher holds the folder's lock.
bool is_running(const std::string& path) {
  const Descriptor folder(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  return folder && flock(folder.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

std::vector<std::string> running_jobs(const rendezvous::Environment& environment) {
  std::vector<std::string> jobs;
  std::vector<std::string> parents = {"/tmp"};
  for (const char* name : {"XDG_RUNTIME_DIR", "TMPDIR"}) {
    const auto found = environment.find(name);
    if (found != environment.end() && !found->second.empty() && found->second != "/tmp")
      parents.push_back(found->second);
  }
  for (const std::string& parent : parents) {
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(parent, ignored)) {
      const std::string path = entry.path().string();
      if (entry.path().filename().string().starts_with(kJobPrefix) && is_running(path)) jobs.push_back(path);
    }
  }
  return jobs;
}

/// One worker that is being asked.
struct Question {
  int rank = 0;
  Descriptor socket;
  std::string answer = {};
  std::int64_t process = 0;
  bool over = false;
};

/// Connects and sends the request, which fits into the socket's buffer.
Question ask_worker(int rank, const std::string& path) {
  Question question{rank, Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0))};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(static_cast<char*>(address.sun_path), sizeof address.sun_path - 1);
  constexpr std::string_view kRequest = "GET /state HTTP/1.0\r\n\r\n";
  ucred peer{};
  socklen_t size = sizeof peer;
  question.over =
      connect(question.socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      send(question.socket.get(), kRequest.data(), kRequest.size(), MSG_NOSIGNAL) != std::ssize(kRequest);
  if (getsockopt(question.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0)
    question.process = peer.pid;
  return question;
}

/// Reads what is there; ends the question at the end of the answer.
void read_answer(Question& question) {
  constexpr std::size_t kLongest = std::size_t{64} << 20;
  std::array<char, 65536> place;
  for (;;) {
    const ssize_t size = recv(question.socket.get(), place.data(), place.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0 || question.answer.size() > kLongest) {
      question.over = true;
      return;
    }
    question.answer.append(place.data(), static_cast<std::size_t>(size));
  }
}

char state_of_process(std::int64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : 'X';
}

WorkerReport report_of(const Question& question) {
  WorkerReport report;
  const auto body = question.answer.find("\r\n\r\n");
  try {
    if (body == std::string::npos) throw_invalid("no answer");
    report = decode_worker_report(std::string_view(question.answer).substr(body + 4));
  } catch (const Error&) {
    report.answers = false;
    report.name = fmt::format("worker of rank {}", question.rank);
  }
  report.rank = question.rank;
  if (report.process == 0) report.process = question.process;
  report.process_state = state_of_process(report.process);
  return report;
}

}  // namespace

std::string find_job(const std::string& job, const rendezvous::Environment& environment) {
  std::error_code ignored;
  if (!job.empty() && std::filesystem::is_directory(job, ignored)) return job;
  std::vector<std::string> jobs = running_jobs(environment);
  std::string names;
  for (const std::string& path : jobs) names += (names.empty() ? "" : ", ") + path;
  if (!job.empty()) std::erase_if(jobs, [&](const std::string& path) { return !path.ends_with(job); });
  if (jobs.size() == 1) return jobs.front();
  if (names.empty()) throw_invalid("no job of 'torchspan run' runs on this host under this user");
  if (jobs.empty()) throw_invalid(fmt::format("there is no job '{}'; jobs that run here: {}", job, names));
  throw_invalid(fmt::format("several jobs run here; name one of: {}", names));
}

std::vector<WorkerReport> ask_workers(Executor& executor, const std::string& folder, Duration timeout) {
  std::vector<Question> questions;
  std::error_code failure;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder, failure)) {
    const std::string name = entry.path().filename().string();
    int rank = 0;
    if (!name.starts_with(kSocketPrefix)) continue;
    const char* end = name.data() + name.size();
    if (std::from_chars(name.data() + kSocketPrefix.size(), end, rank).ptr != end) continue;
    questions.push_back(ask_worker(rank, entry.path().string()));
  }
  if (questions.empty()) {
    throw_invalid(fmt::format(
        "no worker of the job in '{}' can be asked: workers can be seen once they have joined", folder));
  }
  std::sort(questions.begin(), questions.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
  const auto poller = executor.make_poller();
  for (std::size_t i = 0; i < questions.size(); ++i) {
    if (!questions[i].over) poller->add(questions[i].socket.get(), i, false);
  }
  const Deadline until = executor.deadline_in(timeout);
  const auto open = [](const Question& question) { return !question.over; };
  while (std::any_of(questions.begin(), questions.end(), open) && !until.passed(executor.now())) {
    std::array<Poller::Event, 64> events;
    const std::size_t count = poller->wait(events, until);
    for (std::size_t i = 0; i < count; ++i) {
      Question& question = questions[events[i].token];
      read_answer(question);
      if (question.over) poller->remove(question.socket.get());
    }
  }
  std::vector<WorkerReport> reports;
  for (const Question& question : questions) reports.push_back(report_of(question));
  return reports;
}

}  // namespace torchspan::launch
