#include "launch/commands/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <fmt/format.h>
#include <optional>
#include <sstream>
#include <utility>

#include <torchspan/core/error.h>

#include "core/api/throw_invalid.h"
#include "launch/commands/doctor.h"
#include "launch/commands/run_options.h"
#include "launch/commands/schedule_command.h"
#include "launch/commands/watch_command.h"
#include "launch/display/lines.h"
#include "launch/report/report_page.h"
#include "launch/report/verdict.h"
#include "launch/supervisor/job.h"
#include "launch/trace/chrome_json.h"
#include "launch/trace/profiles.h"
#include "launch/trace/trace_set.h"
#include "launch/version.h"
#include "launch/whole_file.h"

namespace torchspan::launch {
namespace {

constexpr int kUnexpected = 1;
constexpr int kWrongUse = 2;

/// The request of `torchspan trace`.
struct TraceOptions {
  std::string folder;
  std::string out;  ///< file
  std::uint64_t most_spans = 1'000'000;
};

/// The request of `torchspan report`.
struct ReportOptions {
  std::string folder;
  std::string out;                   ///< file
  std::string earlier;               ///< folder of the run to compare with; empty: none
  std::size_t most_spans = 120'000;  ///< in the timeline
};

void write_result(const std::string& path, const std::string& contents) {
  const std::string problem = write_whole_file(path, contents);
  if (!problem.empty()) throw_invalid("--out {} cannot be written: {}", path, problem);
}

void describe_trace_options(CLI::App& command, TraceOptions& options) {
  command
      .add_option("folder", options.folder,
                  "Folder with the workers' *.trace files, and profiles of LibTorch (*.json)")
      ->required();
  command.add_option("-o,--out", options.out, "File to write: JSON that ui.perfetto.dev opens")->required();
  command
      .add_option("--max-spans", options.most_spans,
                  "Write at most this many spans, the longest ones; Perfetto holds a few million")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000'000}));
}

void describe_report_options(CLI::App& command, ReportOptions& options) {
  command.add_option("folder", options.folder, "Folder with the workers' *.trace files")->required();
  command.add_option("-o,--out", options.out, "File to write: an HTML page that any browser opens")
      ->required();
  command.add_option("--compare", options.earlier,
                     "Folder with the traces of an earlier run, with which the page compares this one");
  command.add_option("--max-spans", options.most_spans, "Draw at most this many spans, the longest ones")
      ->check(CLI::Range(std::size_t{1}, std::size_t{10'000'000}));
}

/// Writes the report of a run as one HTML page and returns its findings as text. Throws as merge_traces().
std::string make_report(const ReportOptions& options) {
  const TraceSet set = read_traces(options.folder);
  const RunFigures figures = examine_run(set);
  std::optional<RunComparison> comparison;
  if (!options.earlier.empty()) {
    const TraceSet earlier = read_traces(options.earlier);
    comparison = compare_runs(earlier, examine_run(earlier), set, figures);
  }
  write_result(options.out, make_report_page(encode_report(set, figures, options.most_spans,
                                                           comparison ? &*comparison : nullptr)));
  std::string text =
      fmt::format("{}: {} worker{}, {}\n", options.out, set.workers.size(),
                  set.workers.size() == 1 ? "" : "s", format_time(static_cast<double>(set.length)));
  const std::vector<RunFinding> findings = judge_run(set, figures);
  if (findings.empty())
    text += "No wait takes 5 % of the time of any rank: the run is limited by its computation.\n";
  for (const RunFinding& finding : findings) {
    text += fmt::format("{:3.0f} %  {}\n", 100 * finding.share, finding.text);
    if (!finding.advice.empty()) text += fmt::format("       {}\n", finding.advice);
  }
  for (const std::string& note : set.notes) text += fmt::format("note: {}\n", note);
  if (comparison) text += describe_comparison(*comparison);
  return text;
}

/// Merges the workers' traces into one JSON file and returns what to print. Throws Error{kInvalid} that names
/// the file or the worker at fault.
std::string merge_traces(const TraceOptions& options) {
  TraceSet set = read_traces(options.folder);
  attach_profiles(read_profiles(options.folder), set);
  std::ostringstream json;
  const ChromeJsonReport report = write_chrome_json(set, json, options.most_spans);
  write_result(options.out, json.str());
  std::string text =
      fmt::format("{}: {} spans{} of {} worker{}, {} arrows, {:.3f} s; open it at https://ui.perfetto.dev\n",
                  options.out, report.spans,
                  report.profiler_events == 0
                      ? std::string()
                      : fmt::format(" and {} events of LibTorch's profiler", report.profiler_events),
                  set.workers.size(), set.workers.size() == 1 ? "" : "s", report.arrows,
                  static_cast<double>(set.length) / 1e9);
  if (report.left_out > 0) {
    text += fmt::format("note: {} spans shorter than {:.1f} us are left out (--max-spans)\n", report.left_out,
                        static_cast<double>(report.shortest) / 1e3);
  }
  for (const WorkerTrace& worker : set.workers) {
    if (!worker.other_host) continue;
    text += fmt::format("note: times of rank {} ({}) are off by at most {:.0f} us\n", worker.rank(),
                        worker.contents.identity.host, worker.clock_error / 1e3);
  }
  for (const std::string& note : set.notes) text += fmt::format("note: {}\n", note);
  return text;
}

/// The parsed options of a command line.
struct CommandLine {
  CLI::App app{"torchspan: distributed training over LibTorch", "torchspan"};
  CLI::App* run = nullptr;
  CLI::App* version = nullptr;
  CLI::App* doctor = nullptr;
  CLI::App* schedule = nullptr;
  CLI::App* trace = nullptr;
  CLI::App* report = nullptr;
  CLI::App* stacks = nullptr;
  CLI::App* top = nullptr;
  RunOptions job;
  std::vector<std::string> command;  ///< of run: program and arguments
  ScheduleOptions shown;
  TraceOptions merged;
  ReportOptions reported;
  WatchOptions watched;
  std::vector<std::string> program;  ///< for the help text only: take_command() removes these words first
};

void describe_run(CommandLine& line) {
  line.run = line.app.add_subcommand(
      "run", "Run N workers of a program on this host: torchspan run -n 4 ./train --lr 0.1");
  describe_run_options(*line.run, line.job);
  line.run->add_option(
      "PROGRAM", line.program,
      "The program and its arguments: everything from the first word that is not an option, or after "
      "'--'");
}

void describe_schedule(CommandLine& line) {
  line.schedule = line.app.add_subcommand(
      "schedule",
      "Draw a pipeline schedule: torchspan schedule 1f1b --stages 4 --micro-batches 8 --out plan.svg");
  CLI::App& command = *line.schedule;
  ScheduleOptions& shown = line.shown;
  command.add_option("name", shown.name,
                     "One of " + schedule_names() + "; best ranks all of them and shows the first");
  command.add_option("--stages", shown.stages, "Stages of the pipeline, each on a separate rank")
      ->check(CLI::Range(1, 256));
  command.add_option("--micro-batches", shown.micro_batches, "Micro-batches of a step")
      ->check(CLI::Range(1, 1024));
  command
      .add_option("--chunks", shown.chunks,
                  "Parts of each stage: the model then passes the ranks that many times")
      ->check(CLI::Range(1, 16));
  command.add_option(
      "--memory", shown.memory,
      "Memory limit of a rank, for best and zero-bubble: activations of a micro-batch, or with a "
      "costs file in bytes 4GiB and the like");
  command.add_option("--forward", shown.forward,
                     "Milliseconds of a micro-batch's forward through all of a stage");
  command.add_option("--backward", shown.backward, "The same for its backward");
  command
      .add_option("--costs", shown.costs,
                  "FORWARD,INPUT_GRADIENT,WEIGHT_GRADIENT in milliseconds, instead of the two options above")
      ->delimiter(',')
      ->expected(1, 16);
  command.add_option("--costs-file", shown.costs_file,
                     "Measured costs by stage as JSON, instead of the options above and below");
  command.add_option("--transfer", shown.transfer, "Milliseconds from one rank to the next");
  command.add_option("--weight-input", shown.weight_input,
                     "Share of an activation that is kept between input and weight gradient");
  command.add_option("--csv", shown.csv_in, "Read the schedule from a file in PyTorch's CSV format");
  command.add_option("--csv-out", shown.csv_out, "File for the schedule, in PyTorch's CSV format");
  command.add_option("--out", shown.file, "File for the drawing, as SVG");
}

void describe_all(CommandLine& line) {
  line.app.require_subcommand(1);
  line.app.set_version_flag("--version", describe_version, "Print the same as 'torchspan version'");
  describe_run(line);
  line.version = line.app.add_subcommand("version", "Print the version, and what this build uses");
  line.doctor = line.app.add_subcommand("doctor", "Look for what slows or breaks jobs on this machine");
  describe_schedule(line);
  line.trace = line.app.add_subcommand(
      "trace", "Merge the traces of a run's workers for ui.perfetto.dev: torchspan trace FOLDER -o run.json");
  describe_trace_options(*line.trace, line.merged);
  line.report = line.app.add_subcommand(
      "report", "Show what limits a run, as an HTML page: torchspan report FOLDER -o run.html");
  describe_report_options(*line.report, line.reported);
  line.stacks = line.app.add_subcommand("stacks", "Show which worker of a running job waits for which");
  describe_stacks_options(*line.stacks, line.watched);
  line.top = line.app.add_subcommand("top", "Show what the workers of a running job do, every second");
  describe_top_options(*line.top, line.watched);
}

/// Returns the option of `run` that a word names: "-n", "-n4", "--env" or "--env=A=1". Throws kInvalid for an
/// unknown option.
const CLI::Option& option_of(const std::string& word, const CLI::App& run) {
  const std::string name = word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
  if (word == "-np") throw_invalid("'-np' is an option of mpirun; torchspan run calls it -n");
  if (const CLI::Option* option = run.get_option_no_throw(name)) return *option;
  if (name == "--nproc-per-node" || name == "--nproc_per_node") {
    throw_invalid(
        "'{}' is an option of torchrun; torchspan run calls it -n: the number of workers on each host", name);
  }
  throw_invalid(
      "torchspan run has no option '{}'; 'torchspan run --help' lists its options; the program's own go "
      "after the program",
      name);
}

/// Removes the program and its arguments from the end of `torchspan run …`, before the parser sees them. They
/// start after '--' or at the first word that is neither an option nor an option's value.
std::vector<std::string> take_command(std::vector<std::string>& arguments, const CLI::App& run) {
  if (arguments.empty() || arguments.front() != run.get_name()) return {};
  std::size_t at = 1;
  while (at < arguments.size() && arguments[at].starts_with("-") && arguments[at] != "--") {
    const std::string& word = arguments[at];
    const CLI::Option& option = option_of(word, run);
    const bool has_value = word.starts_with("--") ? word.find('=') != std::string::npos : word.size() > 2;
    at += option.get_expected_min() > 0 && !has_value ? 2 : 1;
  }
  at = std::min(at, arguments.size());
  const bool dashes = at < arguments.size() && arguments[at] == "--";
  const auto begin = arguments.begin() + static_cast<std::ptrdiff_t>(at);
  std::vector<std::string> command(begin + (dashes ? 1 : 0), arguments.end());
  arguments.erase(begin, arguments.end());
  return command;
}

void check_subcommand(const std::vector<std::string>& arguments, const CLI::App& app) {
  if (arguments.empty() || arguments.front().starts_with("-")) return;
  std::string names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == arguments.front()) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  throw_invalid("unknown command '{}'; the commands are: {}", arguments.front(), names);
}

int run_workers(Executor& executor, CommandLine& line, const Environment& environment,
                const DisplayOptions& display) {
  if (line.command.empty()) {
    throw_invalid("there is no program to run: torchspan run -n 4 ./train ARGUMENTS");
  }
  JobOptions job = read_run_options(line.job, environment);
  job.command = line.command;
  job.display = display;
  return run_job(executor, std::move(job));
}

void print_lines(Display& out, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) out.print_output("", without_controls(line));
}

/// `prefix`: before the first line.
void print_error_lines(Display& out, std::string prefix, const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    out.print_error(std::exchange(prefix, ""), without_controls(line));
  }
}

/// Prints what a command says of the file `path` that it wrote: as errors if that is the output itself.
void print_summary(Display& out, const std::string& path, const std::string& text) {
  if (is_standard_output(path)) return print_error_lines(out, "", text);
  print_lines(out, text);
}

/// Returns the message for an exception of the system or of a library.
std::string describe_unexpected(const CommandLine& line, const std::exception& error) {
  const auto parsed = line.app.get_subcommands();
  const CLI::App* command = parsed.empty() ? nullptr : parsed.front();
  std::string advice = "check the memory and the limits of this shell (ulimit -a)";
  if (command == line.run) {
    advice = "check the current folder, memory and the limits of this shell (ulimit -a)";
  } else if (command == line.trace || command == line.report) {
    advice = "check the folder of the traces and the free memory, which must hold all of them";
  } else if (command == line.stacks || command == line.top) {
    advice = "check that the job still runs, and the limits of this shell (ulimit -a)";
  }
  return fmt::format("an unexpected error ended 'torchspan{}{}': {}; {}", command == nullptr ? "" : " ",
                     command == nullptr ? "" : command->get_name(), error.what(), advice);
}

/// Returns the exit code of a command that has printed its result.
int finish(Display& out) {
  const std::string lost = out.losses();
  if (lost.empty()) return 0;
  out.print_error("torchspan: ", lost);
  return kLostOutput;
}

}  // namespace

int run_command_line(Executor& executor, std::vector<std::string> arguments, const Environment& environment,
                     const DisplayOptions& display) {
  Display out(executor, display);
  CommandLine line;
  describe_all(line);
  try {
    check_subcommand(arguments, line.app);
    line.command = take_command(arguments, *line.run);
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them in reverse
    line.app.parse(std::move(arguments));
    if (line.run->parsed()) return run_workers(executor, line, environment, display);
    if (line.version->parsed()) {
      print_lines(out, describe_version());
    } else if (line.schedule->parsed()) {
      print_lines(out, show_schedule(line.shown));
    } else if (line.trace->parsed()) {
      print_summary(out, line.merged.out, merge_traces(line.merged));
    } else if (line.report->parsed()) {
      print_summary(out, line.reported.out, make_report(line.reported));
    } else if (line.stacks->parsed()) {
      print_lines(out, show_stacks(executor, line.watched, environment));
    } else if (line.top->parsed()) {
      show_top(executor, line.watched, environment, out, display.output_terminal);
    } else {
      print_lines(out, format_findings(judge(examine_machine())));
    }
    return finish(out);
  } catch (const CLI::ParseError& error) {
    std::ostringstream output, errors;
    const int code = line.app.exit(error, output, errors);
    std::string text = output.str() + errors.str();
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (code == 0) {
      out.print_output("", text);
      return finish(out);
    }
    print_error_lines(out, "torchspan: ", text);
  } catch (const Error& error) {
    print_error_lines(out, "torchspan: ", error.message());
  } catch (const std::exception& error) {  // has ended the workers of a job
    print_error_lines(out, "torchspan: ", describe_unexpected(line, error));
    return kUnexpected;
  }
  return kWrongUse;
}

}  // namespace torchspan::launch
