#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torchspan::launch {

/// What of a machine matters to a job. Limits that are absent are the largest number.
struct Machine {
  int usable_cores = 1;
  int online_cores = 1;
  std::uint64_t memory = 0;
  std::uint64_t open_files = 0, open_files_hard = 0;
  std::uint64_t processes = 0, processes_hard = 0;
  std::uint64_t core_size = 0;
  std::string blas;        ///< the file behind libblas.so.3; empty: not found
  std::string huge_pages;  ///< "always [madvise] never"; empty: not known
};

enum class Verdict { kGood, kNote, kWarning };

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string subject;
  std::string text;    ///< what was found
  std::string advice;  ///< what now; empty when all is well
};

/// Looks at this machine and this process's limits.
Machine examine_machine();
/// What is good and what is not; pure.
std::vector<Finding> judge(const Machine& machine);
/// One line per finding, advice indented below.
std::string format_findings(const std::vector<Finding>& findings);

}  // namespace torchspan::launch
