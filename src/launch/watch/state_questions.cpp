#include "launch/watch/state_questions.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>

#include <torchspan/core/error.h>

namespace torchspan::launch {
namespace {

constexpr std::string_view kSocketPrefix = "observe.";

}  // namespace

char state_of_process(std::int64_t process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : 'X';
}

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
    const std::string name = entry->path().filename().string();
    int rank = 0;
    const char* last = name.data() + name.size();
    if (name.starts_with(kSocketPrefix) &&
        std::from_chars(name.data() + kSocketPrefix.size(), last, rank).ptr == last) {
      auto found = questions_.find(rank);
      if (found == questions_.end() || found->second.request.over()) {
        found = questions_.insert_or_assign(rank, Question{LocalRequest(entry->path().string(), path)}).first;
        const LocalRequest& request = found->second.request;
        if (!request.over()) {
          poller_.add(request.descriptor(), first_token_ + static_cast<std::uint64_t>(rank), false);
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

}  // namespace torchspan::launch
