#include "tests/combinations/training_case.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>

namespace torchspan::combinations {
namespace {

/// Combinations that are known to fail or that programs cannot have. Delete a line to try them.
constexpr Exclusion<Case> kExcluded[] = {
    {"LibTorch's Adam and RMSprop turn rounding errors of single precision into steps",
     [](const Case& one) { return one.single && one.rule != Rule::kSgd && one.rule != Rule::kMomentum; }},
    {"buffers that are broadcast break the group if the first of two forwards throws (docs/data_parallel.md)",
     [](const Case& one) { return one.fault == Fault::kInForward && one.two_forwards && one.buffer == 1; }},
    {"in join(), clipping and GradScaler refuse ignored parameters",
     [](const Case& one) { return one.own && one.scaler && !one.phases[0].batches.empty(); }},
};

Phase phase_of(Choices& choices, const std::string& at, bool sharded) {
  const auto name = [&](const char* what) { return at + what; };
  Phase phase;
  phase.kind = static_cast<Kind>(choices.pick(name("kind"), sharded ? 4 : 3, 90));
  phase.tensor = 1 + choices.pick(name("tensor"), 2, sharded ? 40 : 15);
  phase.data = phase.kind == Kind::kAlone ? 1 : 1 + choices.pick(name("data"), phase.tensor == 1 ? 4 : 2, 90);
  phase.steps = 1 + choices.pick(name("steps"), 4, 80);
  if (phase.kind == Kind::kReplicas || phase.kind == Kind::kZero) {
    phase.buckets = choices.pick(name("buckets"), 3);
    phase.views = !choices.chance(name("copies_gradients"), 30);
    phase.rebuild = !choices.chance(name("keeps_buckets"), 30);
    phase.hook = phase.kind == Kind::kReplicas && choices.chance(name("hook"), 20);
    phase.graph = choices.pick(name("graph"), 3);
  }
  if (phase.kind == Kind::kZero) {
    phase.divide_gradients = choices.chance(name("divide_gradients"));
    phase.overlap_forward = choices.chance(name("overlap_forward"));
  }
  if (phase.kind == Kind::kSharded) {
    phase.reshard = !choices.chance(name("keeps_whole"));
    phase.prefetch = !choices.chance(name("no_prefetch"));
    phase.alone_bytes = choices.pick(name("alone_bytes"), 3);
    phase.overlap_bytes = choices.pick(name("overlap_bytes"), 3);
    phase.own_clip = choices.chance(name("model_clips"));
    const int copies = 1 + choices.pick(name("copies"), phase.data);
    phase.copies = phase.data % copies == 0 ? copies : 1;
  }
  return phase;
}

std::uint64_t hashed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

}  // namespace

Case::Case(Choices& choices, bool sharded) {
  phases.push_back(phase_of(choices, "", sharded));
  if (choices.chance("restores", 50)) phases.push_back(phase_of(choices, "then.", sharded));
  choose_model(choices);
  choose_training(choices);
  choose_events(choices);
}

bool Case::any(bool (*condition)(const Phase& phase)) const {
  return std::any_of(phases.begin(), phases.end(), condition);
}
bool Case::every(bool (*condition)(const Phase& phase)) const {
  return std::all_of(phases.begin(), phases.end(), condition);
}
bool Case::only_replicas() const {
  return every([](const Phase& one) { return one.kind == Kind::kReplicas; });
}
bool Case::wrapped() const {
  return every([](const Phase& one) { return one.kind == Kind::kReplicas || one.kind == Kind::kZero; });
}

void Case::choose_model(Choices& choices) {
  const bool any_sharded = any([](const Phase& one) { return one.kind == Kind::kSharded; });
  const int count = 1 + choices.pick("blocks", 3);
  for (int i = 0; i < count; ++i) {
    const auto name = [&](const char* what) { return fmt::format("block{}.{}", i, what); };
    Block block;
    if (i > 0) block.tied = choices.pick(name("tied"), 3, 30);
    block.frozen_bias = choices.chance(name("frozen_bias"), 25);
    block.frozen = choices.chance(name("frozen"), 10);
    block.unit = any_sharded && choices.chance(name("unit"), 60);
    blocks.push_back(block);
  }
  rule = static_cast<Rule>(choices.pick("rule", 6, 80));
  const bool may_be_sparse = only_replicas() && (rule == Rule::kSgd || rule == Rule::kAdagrad);
  embedding = choices.pick("embedding", may_be_sparse ? 3 : 2);
  const bool same_ranks = phases.back().data == phases.front().data;
  own = wrapped() && same_ranks && choices.chance("own", 20);
  buffer = choices.pick("buffer", wrapped() ? (same_ranks ? 3 : 2) : 1);
  single = any_sharded && choices.chance("single", 15);
}

void Case::choose_training(Choices& choices) {
  decay = embedding != 2 && choices.chance("decay");
  groups = choices.chance("groups");
  scaler = choices.chance("scaler");
  schedule = choices.chance("schedule");
  clip = choices.pick("clip", 4);
  passes = 1 + choices.pick("passes", 3);
  // ZeRO refuses a second reduction before the step.
  const bool reduces_often = every([](const Phase& one) { return one.kind != Kind::kZero; });
  reduce_each = passes > 1 && reduces_often && choices.chance("reduce_each", 30);
  two_forwards = choices.chance("two_forwards", 20);
  in_place_zero = only_replicas() && choices.chance("in_place_zero", 30);
  const bool finds = every([](const Phase& one) { return one.graph == 1 || one.kind == Kind::kAlone; });
  const bool may_skip = every([](const Phase& one) {
    return one.graph != 0 || one.kind == Kind::kAlone || one.kind == Kind::kSharded;
  });
  unused = may_skip ? choices.pick("unused", finds ? 3 : 2) : 0;
  skips = static_cast<std::uint64_t>(choices.pick("skips", 1000, 100));
}

void Case::choose_events(Choices& choices) {
  Phase& first = phases.front();
  const bool may_join =
      (first.kind == Kind::kReplicas && phases.size() == 1) || (first.kind == Kind::kZero && !scaler);
  const bool joins = may_join && choices.chance("join", 25);
  if (joins) {
    for (int rank = 0; rank < first.data; ++rank)
      first.batches.push_back(1 + choices.pick(fmt::format("join.batches{}", rank), first.steps, 80));
    first.steps = *std::max_element(first.batches.begin(), first.batches.end());
    first.initial_divisor = !choices.chance("join.live_divisor");
  }
  if (scaler && !joins && choices.chance("overflow", 40)) {
    const int steps = first.steps + (phases.size() == 1 ? 0 : phases.back().steps);
    overflow_step = choices.pick("overflow.step", steps, 80);
    overflow_rank = choices.pick("overflow.rank", 4, 80);
  }
  if (first.kind != Kind::kAlone && !joins && first.steps > 1) {
    fault = static_cast<Fault>(choices.pick("fault", 5, 25));
    fault_step = choices.pick("fault.step", first.steps - 1, 80);
    fault_rank = choices.pick("fault.rank", first.data, 80);
    fault_part = choices.pick("fault.part", first.tensor, 50);
  }
}

bool Case::ends() const {
  if (fault == Fault::kNone) return false;
  const Phase& first = phases.front();
  if (first.tensor > 1) return true;
  if (first.kind != Kind::kSharded) return false;
  // Forwards and backwards gather parameters from all ranks. With two forwards, the pass has reached the other one.
  return fault == Fault::kInForward || fault == Fault::kBehindModule ||
         (fault == Fault::kBeforeModule && two_forwards);
}

const char* Case::excluded() const {
  for (const auto& one : kExcluded) {
    if (one.applies(*this)) return one.reason;
  }
  return nullptr;
}

bool Case::skipped(std::size_t block, int rank, int step, int pass) const {
  if (unused == 0) return false;
  const bool fixed =
      std::any_of(phases.begin(), phases.end(), [](const Phase& one) { return one.graph == 2; });
  std::uint64_t key = skips * 64 + block;
  if (unused == 2) key = key * 8 + static_cast<std::uint64_t>(rank);
  if (!fixed) key = (key * 16 + static_cast<std::uint64_t>(step)) * 4 + static_cast<std::uint64_t>(pass);
  return hashed(key) % 3 == 0;
}

double Case::rate(int group, int step) const {
  return (group == 0 ? 0.05 : 0.02) * (schedule ? 1.0 / (1 + step) : 1);
}

double Case::norm_type() const {
  return clip == 2 ? 1 : clip == 3 ? std::numeric_limits<double>::infinity() : 2;
}

}  // namespace torchspan::combinations
