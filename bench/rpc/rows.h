#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bench/rpc/meter.h"
#include "bench/rpc/side.h"

namespace torchspan::bench {

/// One figure of the section: what both sides do, in a world of how many, and which limit it is held against.
struct Row {
  std::string name;  ///< e.g. "rpc/echo/64MiB/local"
  Way way = Way::kLocal;
  int size = 2;
  std::function<std::vector<double>(Side&, const Meter&)> measure;
  std::string limit = {};
  double limit_times = 1;  ///< how often the limit's work is in the row's
  std::string unit = "us";
};

/// All rows, in the order in which they are measured and reported.
std::vector<Row> rpc_rows();

/// What the machine itself allows: name and measurement.
struct Limit {
  std::string name;
  std::function<std::vector<double>(const Meter&)> measure;
};
std::vector<Limit> rpc_limits();

}  // namespace torchspan::bench
