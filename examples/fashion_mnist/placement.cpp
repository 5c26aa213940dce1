#include "fashion_mnist/placement.h"

#include <fmt/format.h>

namespace fashion_mnist {

void print_placement(const std::vector<Placed>& parts) {
  fmt::print("  {:<10} {:>8}  {:<12} {:>10} {:>14} {:>12}\n", "worker", "process", "part", "parameters",
             "forward calls", "CPU seconds");
  for (const auto& [worker, part, report] : parts)
    fmt::print("  {:<10} {:>8}  {:<12} {:>10} {:>14} {:>12.1f}\n", worker, report.process, part,
               report.parameters, report.forward_calls, report.cpu_seconds);
}

}  // namespace fashion_mnist
