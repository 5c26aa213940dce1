#include "launch/supervisor/job.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <random>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/core/progress.h>

#include "launch/display/board.h"
#include "launch/display/lines.h"
#include "launch/supervisor/child.h"
#include "launch/supervisor/endings.h"
#include "launch/supervisor/signals.h"

namespace torchspan::launch {
namespace {

constexpr Duration kDrawEvery = std::chrono::milliseconds(100);
constexpr Duration kPrintEvery = std::chrono::seconds(10);
/// How long the launcher waits for output of processes that outlive their worker.
constexpr Duration kDrainTime = std::chrono::seconds(1);
/// How many of a worker's last lines are searched for the worker that it blames; a long error may follow that
/// line.
constexpr std::size_t kBlameLines = 100;

enum class Source : std::uint64_t { kEnd, kOutput, kErrors, kProgress, kSignal };

std::uint64_t token_of(Source source, int rank) {
  return (static_cast<std::uint64_t>(source) << 32) | static_cast<std::uint32_t>(rank);
}

struct Worker {
  Worker(int rank, std::string name, std::string prefix, Child child)
      : rank(rank), name(std::move(name)), prefix(std::move(prefix)), child(std::move(child)) {}

  int rank;
  std::string name, prefix;
  Child child;
  LineSplitter output, errors, progress;
  LastLines words;
  LastLines recent{kBlameLines};
  Descriptor output_log, errors_log;
  bool ended = false;

  bool silent() { return !child.output() && !child.errors() && !child.progress(); }
};

class Job {
 public:
  Job(Executor& executor, JobOptions options)
      : executor_(executor),
        options_(std::move(options)),
        display_(executor, options_.display),
        board_(options_.workers),
        folder_(options_.environment),
        poller_(executor.make_poller()) {}

  int run();

 private:
  JobSetting make_setting() const;
  void start(const std::string& program, const JobSetting& setting, int rank);
  Descriptor open_log(const Worker& worker, const char* kind) const;
  bool over();
  void handle(const Poller::Event& event);
  void on_end(Worker& worker);
  void on_output(Worker& worker);
  void on_errors(Worker& worker);
  void on_progress(Worker& worker);
  void on_signal();
  void read_into(Descriptor& descriptor, Descriptor& log, LineSplitter& lines,
                 const LineSplitter::Take& take);
  void write_log(Descriptor& log, std::string_view text);
  void advance(TimePoint now);
  void note_blames();
  const Worker* find_leaving() const;
  void settle(TimePoint now);
  void stop_all(int signal);
  void end_leftovers(TimePoint now);
  void show_progress(TimePoint now);
  Deadline next_deadline() const;
  int finish();

  Executor& executor_;
  const JobOptions options_;
  Display display_;
  Board board_;
  SignalDescriptor signals_;  // taken over before anything that must be undone
  JobFolder folder_;
  std::unique_ptr<Poller> poller_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Ending> endings_;  ///< in the order they were seen
  TimePoint began_{};
  int interrupted_by_ = 0;
  bool stopping_ = false;
  bool leftovers_killed_ = false;
  Deadline settle_until_, kill_at_, drain_until_;
  Deadline leave_until_;  ///< for workers that others report as gone and whose processes still run
  bool board_changed_ = false;
  TimePoint shown_at_{};
};

JobSetting Job::make_setting() const {
  std::random_device random;
  JobSetting setting;
  setting.workers = options_.workers;
  setting.name_prefix = options_.name_prefix;
  setting.run_id = fmt::format("{:08x}{:08x}", random(), random());
  setting.master_port = choose_port(options_.master_port);
  setting.secret_file = folder_.secret_file();
  setting.runtime_folder = folder_.runtime_folder();
  setting.cores = usable_cores();
  setting.extra = options_.extra;
  return setting;
}

int Job::run() {
  const std::string program = find_program(options_.command.at(0), options_.environment);
  const JobSetting setting = make_setting();
  if (!options_.log_folder.empty()) {
    std::error_code failure;
    std::filesystem::create_directories(options_.log_folder, failure);
    if (failure) {
      throw Error(ErrorKind::kInvalid, fmt::format("the folder for logs '{}' cannot be created: {}",
                                                   options_.log_folder, failure.message()));
    }
  }
  if (const int threads = chosen_threads(options_.environment, setting); threads > 0) {
    display_.say(
        fmt::format("torchspan: OMP_NUM_THREADS={} for each of {} workers on {} cores; set it to choose "
                    "otherwise\n",
                    threads, setting.workers, setting.cores));
  }
  poller_->add(signals_.get(), token_of(Source::kSignal, 0), false);
  began_ = shown_at_ = executor_.now();
  for (int rank = 0; rank < options_.workers; ++rank) start(program, setting, rank);
  std::array<Poller::Event, 64> events;
  while (!over()) {
    const std::size_t count = poller_->wait(events, next_deadline());
    for (std::size_t i = 0; i < count; ++i) handle(events[i]);
    advance(executor_.now());
  }
  return finish();
}

void Job::start(const std::string& program, const JobSetting& setting, int rank) {
  const std::string name = options_.name_prefix + std::to_string(rank);
  auto worker = std::make_unique<Worker>(
      rank, name, prefix_of(name, rank, options_.display.colours),
      Child(program, options_.command, worker_environment(options_.environment, setting, rank)));
  if (!options_.log_folder.empty()) {
    worker->output_log = open_log(*worker, "out");
    worker->errors_log = open_log(*worker, "err");
  }
  poller_->add(worker->child.process_descriptor(), token_of(Source::kEnd, rank), false);
  poller_->add(worker->child.output().get(), token_of(Source::kOutput, rank), false);
  poller_->add(worker->child.errors().get(), token_of(Source::kErrors, rank), false);
  poller_->add(worker->child.progress().get(), token_of(Source::kProgress, rank), false);
  workers_.push_back(std::move(worker));
}

Descriptor Job::open_log(const Worker& worker, const char* kind) const {
  const std::string path = fmt::format("{}/{}.{}.log", options_.log_folder, worker.name, kind);
  Descriptor log(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!log) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("log '{}' cannot be written: {}", path, std::strerror(errno)));
  }
  return log;
}

bool Job::over() {
  return endings_.size() == workers_.size() &&
         std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) { return worker->silent(); });
}

void Job::handle(const Poller::Event& event) {
  const auto source = static_cast<Source>(event.token >> 32);
  if (source == Source::kSignal) return on_signal();
  Worker& worker = *workers_.at(static_cast<std::uint32_t>(event.token));
  if (source == Source::kEnd) on_end(worker);
  if (source == Source::kOutput) on_output(worker);
  if (source == Source::kErrors) on_errors(worker);
  if (source == Source::kProgress) on_progress(worker);
}

void Job::on_end(Worker& worker) {
  const auto status = worker.child.poll_exit();
  if (!status || worker.ended) return;
  worker.ended = true;
  poller_->remove(worker.child.process_descriptor());
  const TimePoint now = executor_.now();
  endings_.push_back(
      {worker.rank, worker.name, worker.child.pid(), status->code, status->signal, stopping_, now - began_});
  const bool failed = endings_.back().failed();
  board_.set_state(worker.rank, !failed     ? WorkerState::kDone
                                : stopping_ ? WorkerState::kStopped
                                            : WorkerState::kFailed);
  board_changed_ = true;
  if (!stopping_ && (failed || !leave_until_.is_never())) {
    settle_until_ = earlier(settle_until_, Deadline(now + kSettleTime));
  }
  if (endings_.size() == workers_.size()) drain_until_ = Deadline(now + kDrainTime);
}

void Job::write_log(Descriptor& log, std::string_view text) {
  while (log && !text.empty()) {
    const auto written = write(log.get(), text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      display_.say(
          fmt::format("torchspan: a log in '{}' ends here: {}\n", options_.log_folder, std::strerror(errno)));
      log.reset();
    }
  }
}

void Job::read_into(Descriptor& descriptor, Descriptor& log, LineSplitter& lines,
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
    poller_->remove(descriptor.get());
    descriptor.reset();
  }
}

void Job::on_output(Worker& worker) {
  read_into(worker.child.output(), worker.output_log, worker.output,
            [&](std::string_view line) { display_.print_output(worker.prefix, line); });
}

void Job::on_errors(Worker& worker) {
  read_into(worker.child.errors(), worker.errors_log, worker.errors, [&](std::string_view line) {
    display_.print_error(worker.prefix, line);
    worker.words.add(line);
    worker.recent.add(line);
  });
}

void Job::on_progress(Worker& worker) {
  Descriptor no_log;
  read_into(worker.child.progress(), no_log, worker.progress, [&](std::string_view line) {
    if (auto report = decode_progress(line)) {
      board_.set_report(worker.rank, std::move(*report));
      board_changed_ = true;
    }
  });
}

void Job::on_signal() {
  const int signal = signals_.take();
  if (signal == 0) return;
  if (interrupted_by_ != 0) {
    kill_at_ = Deadline(executor_.now());
    return;
  }
  interrupted_by_ = signal;
  display_.say(fmt::format("torchspan: {}; stopping the workers (repeat to kill them at once)\n",
                           signal_name(signal)));
  stop_all(signal == SIGINT ? SIGINT : SIGTERM);
}

void Job::stop_all(int signal) {
  stopping_ = true;
  settle_until_ = Deadline::never();
  kill_at_ = executor_.deadline_in(options_.grace);
  for (const auto& worker : workers_) {
    if (worker->ended) continue;
    worker->child.signal_group(signal);
    worker->child.signal_group(SIGCONT);  // a stopped process handles no other signal
    board_.set_state(worker->rank, WorkerState::kStopping);
    board_changed_ = true;
  }
}

void Job::note_blames() {
  for (Ending& ending : endings_)
    ending.blames = blamed_process(workers_.at(static_cast<std::size_t>(ending.rank))->recent.lines());
}

/// Whether another worker reports the end of this worker and its process still runs: the process is exiting,
/// and its exit code will follow.
const Worker* Job::find_leaving() const {
  for (const Ending& ending : endings_) {
    for (const auto& worker : workers_) {
      if (!worker->ended && worker->child.pid() == ending.blames) return worker.get();
    }
  }
  return nullptr;
}

/// Whether the first failure and its consequences have been seen, or the time to wait for them is over.
void Job::settle(TimePoint now) {
  note_blames();
  if (const Worker* leaving = find_leaving()) {
    if (leave_until_.is_never()) leave_until_ = executor_.deadline_in(options_.grace);
    if (!leave_until_.passed(now)) {
      settle_until_ = leave_until_;
      return;
    }
    display_.say(fmt::format(
        "torchspan: {} (rank {}, pid {}) has left the job, but its process still runs {:.1f} s later\n",
        leaving->name, leaving->rank, leaving->child.pid(), to_seconds(options_.grace)));
  }
  const Ending& first = endings_.at(first_failure(endings_).value());
  if (endings_.size() < workers_.size()) {
    display_.say(fmt::format("torchspan: {} (rank {}, pid {}) {}; stopping the others\n", first.name,
                             first.rank, first.pid, describe_failure(first)));
  }
  stop_all(SIGTERM);
}

void Job::end_leftovers(TimePoint now) {
  // Processes that the workers started still hold their pipes: kill them, and close the pipes if even that
  // does not end them.
  for (const auto& worker : workers_) {
    worker->child.signal_group(SIGKILL);
    if (!leftovers_killed_) continue;
    for (auto* pipe : {&worker->child.output(), &worker->child.errors(), &worker->child.progress()}) {
      if (*pipe) poller_->remove(pipe->get());
      pipe->reset();
    }
  }
  leftovers_killed_ = true;
  drain_until_ = Deadline(now + kDrainTime);
}

void Job::advance(TimePoint now) {
  if (settle_until_.passed(now)) settle(now);
  if (endings_.size() == workers_.size()) {
    if (drain_until_.passed(now)) end_leftovers(now);
  } else if (kill_at_.passed(now)) {
    for (const auto& worker : workers_) {
      if (!worker->ended) worker->child.signal_group(SIGKILL);
    }
    kill_at_ = Deadline::never();
  }
  if (display_.broken() && interrupted_by_ == 0) {
    interrupted_by_ = SIGPIPE;
    stop_all(SIGTERM);
  }
  show_progress(now);
}

void Job::show_progress(TimePoint now) {
  const Duration every = display_.is_live() ? kDrawEvery : kPrintEvery;
  if (!board_changed_ || !board_.has_reports() || now - shown_at_ < every) return;
  board_changed_ = false;
  shown_at_ = now;
  if (display_.is_live()) {
    display_.set_live(board_.line(display_.width() - 1));
  } else {
    display_.say("torchspan: " + board_.line() + "\n");
  }
}

Deadline Job::next_deadline() const {
  Deadline next = settle_until_;
  if (endings_.size() == workers_.size()) {
    next = earlier(next, drain_until_);
  } else {
    next = earlier(next, kill_at_);
  }
  if (board_changed_ && board_.has_reports()) {
    next = earlier(next, Deadline(shown_at_ + (display_.is_live() ? kDrawEvery : kPrintEvery)));
  }
  return next;
}

int Job::finish() {
  if (display_.is_live()) display_.set_live("");
  if (board_.has_reports() && (display_.is_live() || board_changed_)) {
    display_.say("torchspan: " + board_.line(display_.is_live() ? display_.width() - 12 : 1000) + "\n");
  }
  note_blames();
  const auto first = first_failure(endings_);
  const auto words = first ? workers_.at(static_cast<std::size_t>(endings_[*first].rank))->words.lines()
                           : std::vector<std::string>();
  display_.say(summarize(endings_, words, interrupted_by_));
  const int code = exit_code(endings_, interrupted_by_);
  const std::string lost = display_.losses();
  if (lost.empty()) return code;
  display_.say("torchspan: " + lost + "\n");
  return code == 0 ? kLostOutput : code;
}

}  // namespace

int run_job(Executor& executor, JobOptions options) {
  if (options.workers < 1) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("the number of workers is {}; expected 1 or more", options.workers));
  }
  if (options.command.empty()) throw Error(ErrorKind::kInvalid, "there is no program to run");
  return Job(executor, std::move(options)).run();
}

}  // namespace torchspan::launch
