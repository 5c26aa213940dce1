#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bench/rpc/meter.h"
#include "bench/rpc/side.h"

namespace torchspan::bench {

/// One figure of the section: the work of both sides, the size of the world, and the limit that the figure is
/// compared with.
struct Row {
  std::string name;  ///< e.g. "rpc/echo/64MiB/local"
  Way way = Way::kLocal;
  int size = 2;
  std::function<std::vector<double>(Side&, const Meter&)> measure;
  std::string limit = {};
  double limit_times = 1;  ///< how many times the limit's work is in the row's
  std::string unit = "us";
};

/// Returns all rows in the order of measuring and reporting.
std::vector<Row> rpc_rows();

/// A limit of the machine: its name and measurement.
struct Limit {
  std::string name;
  std::function<std::vector<double>(const Meter&)> measure;
};
std::vector<Limit> rpc_limits();

}  // namespace torchspan::bench
