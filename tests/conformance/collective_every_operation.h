#pragma once
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "tests/conformance/collective_process.h"

namespace torchspan::testing {

/// A call of a group's operation, which kVictim does not make.
struct GroupCall {
  std::string name;  ///< as errors name it
  bool collective;   ///< all ranks make it: not send() or recv()
  /// Begins the call, and returns what waits for it. Those that block begin when they are waited for.
  std::function<std::function<void()>(const collective::Group&)> begin;
};

/// All of them.
std::vector<GroupCall> all_group_calls();

/// A rank dies, and the others call every operation, each in a group of its own: scenarios of processes by name.
std::map<std::string, Scenario> every_operation_scenarios();

}  // namespace torchspan::testing
