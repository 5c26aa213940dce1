#include "collective/device/device_engine.h"

#include <fmt/format.h>

#include <ATen/ATen.h>

#include "collective/world_link.h"
#include "device/api/tensors.h"

namespace torchspan::collective {

Error departed_member_error(const std::string& peer, const std::string& how) {
  return {ErrorKind::kDisconnected,
          fmt::format("{}, and the group cannot continue without it", text_of_departed(peer, how))};
}

bool all_ranks_end(const EngineParts& parts) noexcept {
  try {
    if (parts.failure->get()) return false;
    parts.control->barrier(std::chrono::seconds(5));
    return true;
  } catch (...) {
    return false;
  }
}

namespace {

/// How long the thread yields, and then how long it sleeps, between two looks at the device.
constexpr Duration kYielding = std::chrono::microseconds(200);
constexpr Duration kSleep = std::chrono::microseconds(50);

}  // namespace

void wait_on_host(const device::Mark& end, Executor& executor, Duration timeout,
                  const std::function<void(Duration)>& check, const std::function<Error()>& late) {
  const TimePoint began = executor.now();
  const Deadline deadline = executor.deadline_in(timeout);
  std::unique_ptr<Parker> parker;
  while (!end.reached()) {
    const TimePoint now = executor.now();
    check(now - began);
    if (deadline.passed(now)) throw late();
    if (now - began < kYielding) {
      executor.yield();
      continue;
    }
    if (!parker) parker = executor.make_parker();
    parker->park(executor.deadline_in(kSleep));
  }
}

namespace {

/// By its four real products, as the kernels for the CPU do.
at::Tensor complex_product(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = at::real(a), y = at::imag(a), u = at::real(b), v = at::imag(b);
  return at::complex(x * u - y * v, x * v + y * u);
}

at::Tensor combine(const at::Tensor& result, const at::Tensor& next, ReduceOp reduction) {
  const bool flags = result.scalar_type() == at::kBool;
  switch (reduction) {
    case kSum:
    case kAvg:
      return flags ? at::logical_or(result, next) : at::add(result, next);
    case kProduct:
      if (result.is_complex()) return complex_product(result, next);
      return flags ? at::logical_and(result, next) : at::mul(result, next);
    case kMin:
      return flags ? at::logical_and(result, next) : at::minimum(result, next);
    case kMax:
      return flags ? at::logical_or(result, next) : at::maximum(result, next);
    case kBitAnd:
      return at::bitwise_and(result, next);
    case kBitOr:
      return at::bitwise_or(result, next);
    case kBitXor:
      return at::bitwise_xor(result, next);
  }
  return result;
}

}  // namespace

at::Tensor reduce_in_rank_order(const std::vector<at::Tensor>& sources, ReduceOp reduction) {
  at::Tensor result = device::widened(sources[0]);
  for (std::size_t rank = 1; rank < sources.size(); ++rank) {
    result = combine(result, device::widened(sources[rank]), reduction);
  }
  if (reduction == kAvg) {
    const auto ranks = static_cast<double>(sources.size());
    result = result.is_complex() ? at::view_as_complex(at::view_as_real(result) / ranks) : result / ranks;
  }
  return result.to(sources[0].scalar_type());
}

}  // namespace torchspan::collective
