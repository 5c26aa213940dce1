#include "launch/commands/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace torchspan::launch::doctor_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Machine healthy() {
  Machine machine;
  machine.usable_cores = machine.online_cores = 8;
  machine.memory = std::uint64_t{16} << 30;
  machine.open_files = 1024;
  machine.open_files_hard = 1 << 20;
  machine.processes = machine.processes_hard = 30000;
  machine.core_size = 1;
  machine.blas = "/usr/lib/x86_64-linux-gnu/openblas-openmp/libblas.so.3";
  machine.huge_pages = "always [madvise] never";
  return machine;
}

TEST(Doctor, FindsNothingOnAHealthyMachine) {
  const std::string text = format_findings(judge(healthy()));
  EXPECT_THAT(text, HasSubstr("no warnings"));
  EXPECT_THAT(text, Not(HasSubstr("advice:")));
}

TEST(Doctor, AdvisesAboutEachProblem) {
  struct Row {
    std::function<void(Machine&)> break_machine;
    Verdict verdict;
    const char* subject;
    const char* advice;
  };
  const std::vector<Row> rows = {
      {[](Machine& m) { m.blas = "/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"; }, Verdict::kWarning,
       "BLAS", "libopenblas0-openmp"},
      {[](Machine& m) { m.blas = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3"; }, Verdict::kNote,
       "BLAS", "libopenblas0-openmp"},
      {[](Machine& m) { m.blas = "/opt/mkl/libmkl_rt.so"; }, Verdict::kNote, "BLAS", "OpenBLAS"},
      {[](Machine& m) { m.blas = ""; }, Verdict::kNote, "BLAS", "ldd"},
      {[](Machine& m) { m.usable_cores = 2; }, Verdict::kNote, "cores", "taskset"},
      {[](Machine& m) { m.open_files = 256; }, Verdict::kWarning, "open files", ": ulimit -n 4096"},
      {[](Machine& m) { m.open_files = 256, m.open_files_hard = 512; }, Verdict::kWarning, "open files",
       "ulimit -n 512; the hard limit is 512: as root raise nofile in /etc/security/limits.conf"},
      {[](Machine& m) { m.open_files = m.open_files_hard = 256; }, Verdict::kWarning, "open files",
       "fewer than 1024: the hard limit is 256"},
      {[](Machine& m) { m.processes = 100; }, Verdict::kWarning, "threads", ": ulimit -u 4096"},
      {[](Machine& m) { m.processes = m.processes_hard = 100; }, Verdict::kWarning, "threads",
       "the hard limit is 100: as root raise nproc"},
      {[](Machine& m) { m.core_size = 0; }, Verdict::kNote, "core dumps", "ulimit -c"},
      {[](Machine& m) { m.huge_pages = "always madvise [never]"; }, Verdict::kNote, "huge pages", "madvise"},
  };
  for (const Row& row : rows) {
    Machine machine = healthy();
    row.break_machine(machine);
    int found = 0;
    for (const Finding& finding : judge(machine)) {
      if (finding.verdict == Verdict::kGood) continue;
      ++found;
      EXPECT_EQ(finding.verdict, row.verdict) << row.subject;
      EXPECT_EQ(finding.subject, row.subject);
      EXPECT_THAT(finding.advice, HasSubstr(row.advice));
    }
    EXPECT_EQ(found, 1) << row.subject;
  }
}

TEST(Doctor, ExaminesThisMachine) {
  const Machine machine = examine_machine();
  EXPECT_GE(machine.usable_cores, 1);
  EXPECT_GE(machine.online_cores, machine.usable_cores);
  EXPECT_GT(machine.memory, std::uint64_t{64} << 20);
  EXPECT_GT(machine.open_files, 2u);
  EXPECT_THAT(format_findings(judge(machine)), AllOf(HasSubstr("cores"), HasSubstr("open files"),
                                                     HasSubstr("BLAS"), Not(HasSubstr("/dev/shm"))));
}

}  // namespace
}  // namespace torchspan::launch::doctor_test
