#include "launch/watch/state_questions.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <sys/socket.h>
#include <sys/un.h>

#include <torchspan/core/error.h>

namespace torchspan::launch {
namespace {

constexpr std::string_view kSocketPrefix = "observe.";

char state_of_process(std::int64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : 'X';
}

}  // namespace

StateQuestions::~StateQuestions() {
  for (const auto& [rank, question] : questions_) {
    if (!question.over) poller_.remove(question.socket.get());
  }
}

/// Connects and sends the request, which fits into the socket's buffer.
StateQuestions::Question StateQuestions::begin(const std::string& socket_path, const std::string& path) {
  Question question{Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0))};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket_path.copy(static_cast<char*>(address.sun_path), sizeof address.sun_path - 1);
  const std::string request = fmt::format("GET {} HTTP/1.0\r\n\r\n", path);
  ucred peer{};
  socklen_t size = sizeof peer;
  question.over =
      !question.socket ||
      connect(question.socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      send(question.socket.get(), request.data(), request.size(), MSG_NOSIGNAL) != std::ssize(request);
  if (question.socket && getsockopt(question.socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
    question.process = peer.pid;
  }
  return question;
}

std::size_t StateQuestions::ask(const std::string& folder, const std::string& path) {
  for (auto& [rank, question] : questions_) question.asked = false;
  std::error_code failure;
  std::filesystem::recursive_directory_iterator entry(folder, failure), end;
  while (!failure && entry != end) {
    const std::string name = entry->path().filename().string();
    int rank = 0;
    const char* last = name.data() + name.size();
    if (name.starts_with(kSocketPrefix) &&
        std::from_chars(name.data() + kSocketPrefix.size(), last, rank).ptr == last) {
      const auto [place, is_new] = questions_.try_emplace(rank);
      Question& question = place->second;
      if (is_new || question.over) {
        question = begin(entry->path().string(), path);
        if (!question.over) {
          poller_.add(question.socket.get(), first_token_ + static_cast<std::uint64_t>(rank), false);
        }
      }
      question.asked = true;
    }
    entry.increment(failure);
  }
  std::erase_if(questions_, [](const auto& entry) { return entry.second.over && !entry.second.asked; });
  return questions_.size();
}

/// Reads what is there; marks the end of the answer.
void StateQuestions::read_answer(Question& question) {
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

void StateQuestions::handle(const Poller::Event& event) {
  const auto found = questions_.find(static_cast<int>(event.token - first_token_));
  if (found == questions_.end() || found->second.over) return;  // an event of an earlier question
  read_answer(found->second);
  if (found->second.over) poller_.remove(found->second.socket.get());
}

bool StateQuestions::waiting() const {
  return std::any_of(questions_.begin(), questions_.end(),
                     [](const auto& entry) { return !entry.second.over; });
}

WorkerReport StateQuestions::report_of(int rank, const Question& question) {
  WorkerReport report;
  const auto body = question.answer.find("\r\n\r\n");
  try {
    if (body == std::string::npos || !question.over) throw_invalid("no answer");
    report = decode_worker_report(std::string_view(question.answer).substr(body + 4));
  } catch (const Error&) {
    report.answers = false;
    report.name = fmt::format("worker of rank {}", rank);
  }
  report.rank = rank;
  if (report.process == 0) report.process = question.process;
  report.process_state = state_of_process(report.process);
  return report;
}

std::vector<WorkerReport> StateQuestions::reports() const {
  std::vector<WorkerReport> reports;
  for (const auto& [rank, question] : questions_) reports.push_back(report_of(rank, question));
  return reports;
}

}  // namespace torchspan::launch
