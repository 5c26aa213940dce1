#include "launch/commands/doctor.h"

#include <filesystem>
#include <fmt/format.h>
#include <limits>
#include <sys/resource.h>
#include <unistd.h>

#include "core/api/system_files.h"
#include "launch/supervisor/prepare.h"

namespace torchspan::launch {
namespace {

constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;
constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30;
constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::uint64_t limit_of(rlim_t value) { return value == RLIM_INFINITY ? kUnlimited : std::uint64_t{value}; }

std::string format_limit(std::uint64_t value) {
  return value == kUnlimited ? "unlimited" : std::to_string(value);
}

std::string format_memory(std::uint64_t bytes) {
  if (bytes >= kGibibyte)
    return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / static_cast<double>(kGibibyte));
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / static_cast<double>(kMebibyte));
}

/// The file that Debian's alternatives select for libblas.so.3.
std::string find_blas() {
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator("/etc/alternatives", failure)) {
    if (!entry.path().filename().string().starts_with("libblas.so.3-")) continue;
    const auto file = std::filesystem::canonical(entry.path(), failure);
    if (!failure) return file.string();
  }
  return "";
}

Finding judge_blas(const Machine& machine) {
  const std::string& file = machine.blas;
  if (file.find("openblas-openmp") != std::string::npos) return {Verdict::kGood, "BLAS", file, ""};
  if (file.empty()) {
    return {Verdict::kNote, "BLAS", "libblas.so.3 is not among Debian's alternatives",
            "check the output of 'ldd' on your program; OpenBLAS in its OpenMP flavor is what TorchSpan is "
            "measured with"};
  }
  if (file.find("openblas") != std::string::npos) {
    return {
        Verdict::kNote, "BLAS", file,
        "this flavor keeps a thread pool in addition to OpenMP's; better: apt install "
        "libopenblas0-openmp, then as root: update-alternatives --config libblas.so.3-$(uname -m)-linux-gnu"};
  }
  if (file.find("/blas/") != std::string::npos) {
    return {Verdict::kWarning, "BLAS",
            file + " is the reference BLAS: matrix products are about 35 times slower",
            "apt install libopenblas0-openmp, then as root: update-alternatives --auto "
            "libblas.so.3-$(uname -m)-linux-gnu"};
  }
  return {Verdict::kNote, "BLAS", file, "TorchSpan is measured with the OpenMP flavor of OpenBLAS"};
}

Finding judge_cores(const Machine& machine) {
  const std::string text = fmt::format("{} usable of {}", machine.usable_cores, machine.online_cores);
  if (machine.usable_cores < machine.online_cores) {
    return {
        Verdict::kNote, "cores", text,
        "this shell may use only some of the cores: see 'taskset -p $$', and the CPU limit of its container "
        "or control group (cpu.max)"};
  }
  return {Verdict::kGood, "cores", text, ""};
}

/// A limit of this shell and the highest value that `command` can raise it to.
struct Limit {
  std::uint64_t soft, hard;
  const char* command;  ///< "ulimit -n"
  const char* name;     ///< in limits.conf, and in docker's --ulimit
};

constexpr std::uint64_t kFewest = 1024, kPlenty = 4096;

/// Advice for a limit that is too low; only root can raise a hard limit.
std::string how_to_raise(const Limit& limit) {
  if (limit.hard >= kPlenty) return fmt::format("{} {}", limit.command, kPlenty);
  const std::string beyond = fmt::format(
      "the hard limit is {0}: as root raise {1} in /etc/security/limits.conf and log in again, or in a "
      "container: --ulimit {1}={2}",
      format_limit(limit.hard), limit.name, kPlenty);
  if (limit.hard <= limit.soft) return beyond;
  return fmt::format("{} {}; {}", limit.command, format_limit(limit.hard), beyond);
}

Finding judge_open_files(const Machine& machine) {
  const std::string text = fmt::format("{} (can be raised to {})", format_limit(machine.open_files),
                                       format_limit(machine.open_files_hard));
  if (machine.open_files >= kFewest) return {Verdict::kGood, "open files", text, ""};
  return {Verdict::kWarning, "open files", text,
          fmt::format("fewer than {}: {}", kFewest,
                      how_to_raise({machine.open_files, machine.open_files_hard, "ulimit -n", "nofile"}))};
}

Finding judge_processes(const Machine& machine) {
  const std::string text = format_limit(machine.processes);
  if (machine.processes >= kFewest) return {Verdict::kGood, "threads", text, ""};
  return {Verdict::kWarning, "threads", text,
          fmt::format("every worker has some dozens of threads: {}",
                      how_to_raise({machine.processes, machine.processes_hard, "ulimit -u", "nproc"}))};
}

}  // namespace

Machine examine_machine() {
  Machine machine;
  machine.usable_cores = usable_cores();
  machine.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.memory =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    machine.open_files = limit_of(limit.rlim_cur);
    machine.open_files_hard = limit_of(limit.rlim_max);
  }
  if (getrlimit(RLIMIT_NPROC, &limit) == 0) {
    machine.processes = limit_of(limit.rlim_cur);
    machine.processes_hard = limit_of(limit.rlim_max);
  }
  if (getrlimit(RLIMIT_CORE, &limit) == 0) machine.core_size = limit_of(limit.rlim_cur);
  machine.blas = find_blas();
  machine.huge_pages = read_system_line("/sys/kernel/mm/transparent_hugepage/enabled");
  return machine;
}

std::vector<Finding> judge(const Machine& machine) {
  std::vector<Finding> findings = {judge_cores(machine),
                                   {Verdict::kGood, "memory", format_memory(machine.memory), ""},
                                   judge_blas(machine),
                                   judge_open_files(machine),
                                   judge_processes(machine)};
  if (machine.core_size == 0) {
    findings.push_back(
        {Verdict::kNote, "core dumps", "off", "to keep the core dump of a crash: ulimit -c unlimited"});
  } else {
    findings.push_back({Verdict::kGood, "core dumps", format_limit(machine.core_size), ""});
  }
  if (machine.huge_pages.find("[never]") != std::string::npos) {
    findings.push_back(
        {Verdict::kNote, "huge pages", machine.huge_pages,
         "without them, large receive buffers are four to five times slower: as root, echo madvise > "
         "/sys/kernel/mm/transparent_hugepage/enabled"});
  } else if (!machine.huge_pages.empty()) {
    findings.push_back({Verdict::kGood, "huge pages", machine.huge_pages, ""});
  }
  return findings;
}

std::string format_findings(const std::vector<Finding>& findings) {
  std::string text;
  int warnings = 0;
  for (const Finding& finding : findings) {
    const char* mark = finding.verdict == Verdict::kGood   ? "ok     "
                       : finding.verdict == Verdict::kNote ? "note   "
                                                           : "WARNING";
    warnings += finding.verdict == Verdict::kWarning ? 1 : 0;
    text += fmt::format("{}  {:<11} {}\n", mark, finding.subject, finding.text);
    if (!finding.advice.empty()) text += fmt::format("         advice: {}\n", finding.advice);
  }
  return text + (warnings == 0 ? "no warnings\n"
                               : fmt::format("{} warning{}\n", warnings, warnings == 1 ? "" : "s"));
}

}  // namespace torchspan::launch
