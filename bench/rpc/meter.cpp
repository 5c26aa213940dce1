#include "bench/rpc/meter.h"

#include <fstream>
#include <sstream>
#include <stdexcept>
#include <unistd.h>

#include "bench/harness.h"

namespace torchspan::bench {
namespace {

/// Processor seconds that process `pid` has used; the system counts in ticks of 10 ms.
double cpu_seconds(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) throw std::runtime_error("the worker's process is gone");
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string skipped;
  for (int i = 0; i < 11; ++i) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

std::vector<double> Meter::times(int most, const std::function<void()>& once, int calls) const {
  std::vector<double> samples;
  for (int i = 0; i < std::max(2, most / 10); ++i) once();
  const Deadline enough = executor_.deadline_in(longer_ * std::chrono::milliseconds(is_quick() ? 100 : 500));
  for (int i = 0; i < longer_ * most; ++i) {
    const TimePoint begin = executor_.now();
    once();
    const TimePoint end = executor_.now();
    samples.push_back(std::chrono::duration<double, std::micro>(end - begin).count() / calls);
    if (i >= 3 && enough.passed(end)) break;
  }
  return samples;
}

double Meter::idle_cpu() const {
  const auto watched = std::chrono::seconds(is_quick() ? 1 : 3);
  const double before = cpu_seconds(worker_);
  executor_.sleep(watched);
  return 100 * (cpu_seconds(worker_) - before) / static_cast<double>(watched.count());
}

}  // namespace torchspan::bench
