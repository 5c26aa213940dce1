#include "rpc/agent/inline_policy.h"

namespace torchspan::rpc {
namespace {

/// How long a function declared kInline may take, including the time in which other threads have its core.
constexpr Duration kShort = std::chrono::milliseconds(10);
/// What a long run adds to a function's score, while each later short run subtracts one; and the score that
/// moves a function to the pool. Three long runs in a row reach it; an occasional long run, when another
/// thread took the core, does not.
constexpr int kLongRun = 8, kTooLong = 17;

}  // namespace

bool InlinePolicy::ran(std::uint64_t function, Duration took) {
  if (took <= kShort) {
    if (const auto found = long_runs_.find(function); found != long_runs_.end() && --found->second == 0)
      long_runs_.erase(found);
    return false;
  }
  if ((long_runs_[function] += kLongRun) < kTooLong) return false;
  long_runs_.erase(function);
  return true;
}

}  // namespace torchspan::rpc
