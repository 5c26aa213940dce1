#include "core/api/step_part.h"

#include <fmt/format.h>
#include <utility>

#include <torchspan/core/error.h>

namespace torchspan {

namespace {

constexpr int kInstanceBits = 8;  ///< of a group's number; the others are of its ranks

std::uint32_t hash_of(std::span<const int> ranks) {
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const int rank : ranks) hash = (hash ^ static_cast<std::uint32_t>(rank)) * 16777619u;
  return hash >> (kInstanceBits + 1);
}

}  // namespace

std::int32_t group_number(std::span<const int> ranks, std::uint64_t instance) {
  const auto low = static_cast<std::uint32_t>((instance * 0x9E3779B97F4A7C15ULL) >> (64 - kInstanceBits));
  return static_cast<std::int32_t>((hash_of(ranks) << kInstanceBits) | low);
}

bool has_ranks(std::int32_t group_number, std::span<const int> ranks) {
  return static_cast<std::uint32_t>(group_number) >> kInstanceBits == hash_of(ranks);
}

const char* name_of(StepPart::Kind kind) {
  switch (kind) {
    case StepPart::Kind::kNone:
      return "";
    case StepPart::Kind::kForward:
      return "forward";
    case StepPart::Kind::kRepeatedForward:
      return "repeated forward";
    case StepPart::Kind::kBackward:
      return "backward";
    case StepPart::Kind::kInputGradient:
      return "input gradient";
    case StepPart::Kind::kWeightGradient:
      return "weight gradient";
  }
  return "unknown part";  // read from shared memory
}

std::string describe_unit(std::int32_t unit) { return fmt::format(" of unit #{}", unit); }

std::string describe(const StepPart& part) {
  const std::string unit = part.unit < 0 ? "" : describe_unit(part.unit);
  if (part.kind == StepPart::Kind::kNone) return unit;
  return unit + fmt::format(" in the {} of micro-batch {} through layer range {} of step {}",
                            name_of(part.kind), part.micro_batch, part.layer_range, part.step);
}

StepPartScope*& StepPartScope::of_thread() {
  thread_local StepPartScope* the_scope = nullptr;
  return the_scope;
}

StepPartScope::StepPartScope(const StepPart& part, const char* unordered)
    : part_(part), unordered_(unordered), outside_(std::exchange(of_thread(), this)) {}

StepPartScope::~StepPartScope() { of_thread() = outside_; }

StepPart StepPartScope::current() {
  const StepPartScope* const scope = of_thread();
  return scope == nullptr ? StepPart() : scope->part_;
}

void StepPartScope::begin_operation(const char* call) {
  // A layer may run another pipeline, whose operations are also the layer's.
  for (StepPartScope* scope = of_thread(); scope != nullptr; scope = scope->outside_) {
    if (scope->unordered_ != nullptr) {
      throw Error(ErrorKind::kUnsupported,
                  fmt::format("{}{}, which pipelines that share the group may run in different orders: {}",
                              call, describe(scope->part_), scope->unordered_));
    }
    scope->communicated_ = true;
  }
}

}  // namespace torchspan
