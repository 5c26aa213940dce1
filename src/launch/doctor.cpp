#include "launch/doctor.h"

#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "launch/prepare.h"

namespace torchspan::launch {
namespace {

constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;
constexpr std::uint64_t kGibibyte = std::uint64_t{1} << 30;
constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::uint64_t limit_of(rlim_t value) { return value == RLIM_INFINITY ? kUnlimited : std::uint64_t{value}; }

std::string format_limit(std::uint64_t value) {
  return value == kUnlimited ? "unlimited" : std::to_string(value);
}

std::string format_bytes(std::uint64_t bytes) {
  if (bytes >= kGibibyte)
    return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / static_cast<double>(kGibibyte));
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / static_cast<double>(kMebibyte));
}

/// The file that Debian's alternatives choose for libblas.so.3.
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
            "see what 'ldd' of your program says; OpenBLAS in its OpenMP flavour is what TorchSpan is "
            "measured with"};
  }
  if (file.find("openblas") != std::string::npos) {
    return {
        Verdict::kNote, "BLAS", file,
        "this flavour keeps a thread pool of its own beside OpenMP's; better: apt install "
        "libopenblas0-openmp, then as root: update-alternatives --config libblas.so.3-$(uname -m)-linux-gnu"};
  }
  if (file.find("/blas/") != std::string::npos) {
    return {Verdict::kWarning, "BLAS",
            file + " is the reference BLAS: matrix products are about 35 times slower",
            "apt install libopenblas0-openmp, then as root: update-alternatives --auto "
            "libblas.so.3-$(uname -m)-linux-gnu"};
  }
  return {Verdict::kNote, "BLAS", file, "TorchSpan is measured with the OpenMP flavour of OpenBLAS"};
}

Finding judge_shared_memory(const Machine& machine) {
  if (!machine.has_shared_memory) {
    return {Verdict::kWarning, "/dev/shm", "is not there",
            "mount a tmpfs on /dev/shm, or in a container: --shm-size=2g"};
  }
  const std::string text = fmt::format("{} free of {}", format_bytes(machine.shared_memory_free),
                                       format_bytes(machine.shared_memory));
  if (machine.shared_memory_free < kGibibyte) {
    return {Verdict::kWarning, "/dev/shm", text,
            "less than 1 GiB for tensors between workers: remove old files there, or in a container: "
            "--shm-size=2g"};
  }
  return {Verdict::kGood, "/dev/shm", text, ""};
}

Finding judge_cores(const Machine& machine) {
  const std::string text = fmt::format("{} usable of {}", machine.usable_cores, machine.online_cores);
  if (machine.usable_cores < machine.online_cores) {
    return {Verdict::kNote, "cores", text, "this shell is bound to some of the cores: see 'taskset -p $$'"};
  }
  return {Verdict::kGood, "cores", text, ""};
}

Finding judge_open_files(const Machine& machine) {
  const std::string text = fmt::format("{} (can be raised to {})", format_limit(machine.open_files),
                                       format_limit(machine.open_files_hard));
  if (machine.open_files < 1024) {
    return {Verdict::kWarning, "open files", text,
            "fewer than 1024: ulimit -n 4096, or raise it in limits.conf"};
  }
  return {Verdict::kGood, "open files", text, ""};
}

Finding judge_processes(const Machine& machine) {
  const std::string text = format_limit(machine.processes);
  if (machine.processes < 1024) {
    return {Verdict::kWarning, "threads", text, "every worker has some dozens of threads: ulimit -u 4096"};
  }
  return {Verdict::kGood, "threads", text, ""};
}

}  // namespace

Machine examine_machine() {
  Machine machine;
  machine.usable_cores = usable_cores();
  machine.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.memory =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  struct statvfs shared {};
  machine.has_shared_memory = statvfs("/dev/shm", &shared) == 0;
  machine.shared_memory = std::uint64_t{shared.f_blocks} * shared.f_frsize;
  machine.shared_memory_free = std::uint64_t{shared.f_bavail} * shared.f_frsize;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    machine.open_files = limit_of(limit.rlim_cur);
    machine.open_files_hard = limit_of(limit.rlim_max);
  }
  if (getrlimit(RLIMIT_NPROC, &limit) == 0) machine.processes = limit_of(limit.rlim_cur);
  if (getrlimit(RLIMIT_CORE, &limit) == 0) machine.core_size = limit_of(limit.rlim_cur);
  machine.blas = find_blas();
  std::ifstream pages("/sys/kernel/mm/transparent_hugepage/enabled");
  std::getline(pages, machine.huge_pages);
  return machine;
}

std::vector<Finding> judge(const Machine& machine) {
  std::vector<Finding> findings = {
      judge_cores(machine),      {Verdict::kGood, "memory", format_bytes(machine.memory), ""},
      judge_blas(machine),       judge_shared_memory(machine),
      judge_open_files(machine), judge_processes(machine)};
  if (machine.core_size == 0) {
    findings.push_back({Verdict::kNote, "core dumps", "off", "to keep one of a crash: ulimit -c unlimited"});
  } else {
    findings.push_back({Verdict::kGood, "core dumps", format_limit(machine.core_size), ""});
  }
  if (machine.huge_pages.find("[never]") != std::string::npos) {
    findings.push_back(
        {Verdict::kNote, "huge pages", machine.huge_pages,
         "large receive buffers are four to five times slower without: as root, echo madvise > "
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
    if (!finding.advice.empty()) text += fmt::format("         what now: {}\n", finding.advice);
  }
  return text + (warnings == 0 ? "no warnings\n"
                               : fmt::format("{} warning{}\n", warnings, warnings == 1 ? "" : "s"));
}

}  // namespace torchspan::launch
