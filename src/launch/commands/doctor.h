#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace torchspan::launch {

/// The properties of a machine that matter to a job. Missing limits are the largest number.
struct Machine {
  int usable_cores = 1;
  int online_cores = 1;
  std::uint64_t memory = 0;
  std::uint64_t open_files = 0, open_files_hard = 0;
  std::uint64_t processes = 0, processes_hard = 0;
  std::uint64_t core_size = 0;
  std::string blas;        ///< the file behind libblas.so.3; empty if not found
  std::string huge_pages;  ///< "always [madvise] never"; empty if unknown
};

enum class Verdict { kGood, kNote, kWarning };

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string subject;
  std::string text;    ///< what was found
  std::string advice;  ///< what to do; empty if all is well
};

/// Examines this machine and the limits of this process.
Machine examine_machine();
/// Lists what is good and what is not; a pure function.
std::vector<Finding> judge(const Machine& machine);
/// One line per finding, with the advice indented below.
std::string format_findings(const std::vector<Finding>& findings);

}  // namespace torchspan::launch
