#pragma once
// A small training in one or two phases, which may divide the model in different ways: what is chosen about it.
#include <cstdint>
#include <string>
#include <vector>

#include "tests/combinations/choices.h"

namespace torchspan::combinations {

/// How ranks share the model and the batches.
enum class Kind : std::uint8_t { kAlone, kReplicas, kZero, kSharded };
enum class Fault : std::uint8_t { kNone, kInForward, kBeforeBackward, kBehindModule, kBeforeModule };
enum class Rule : std::uint8_t { kSgd, kMomentum, kAdam, kAdamW, kRmsprop, kAdagrad };

struct Block {
  bool frozen_bias = false;
  bool frozen = false;  ///< all parameters
  int tied = 0;         ///< 1: uses the first block's module, 2: also registers it
  bool unit = false;    ///< in phases with sharded parameters
  bool recompute = false;
};

struct Phase {
  Kind kind = Kind::kAlone;
  int data = 1;    ///< ranks with different batches
  int tensor = 1;  ///< ranks that divide the layers
  int steps = 1;
  // Replicas and ZeRO
  int graph = 0;  ///< 1: finds unused parameters, 2: static
  int buckets = 0;
  bool views = true, rebuild = true, hook = false;
  bool divide_gradients = false, overlap_forward = false;
  std::vector<int> batches = {};  ///< in join(), of each data rank; empty: without join()
  bool initial_divisor = true;
  // Sharded
  bool reshard = true, prefetch = true, own_clip = false;
  int alone_bytes = 0, overlap_bytes = 0, mapped_bytes = 0;
  int copies = 1;

  int ranks() const { return data * tensor; }
};

struct Case {
  Case(Choices& choices, bool sharded);
  /// Why the case is not tried; null: it is.
  const char* excluded() const;

  std::vector<Phase> phases;
  // The model
  std::vector<Block> blocks;
  int embedding = 0;    ///< 1: dense, 2: sparse gradients
  bool own = false;     ///< an ignored parameter, which each rank trains alone
  int buffer = 0;       ///< 1: that of rank 0 counts, 2: each rank has its own
  bool single = false;  ///< computes in single precision (mixed precision)
  // The training
  Rule rule = Rule::kSgd;
  bool decay = false, groups = false, scaler = false, schedule = false;
  int clip = 0;              ///< 1: to a norm of type 2, 2: of type 1, 3: infinity
  int passes = 1;            ///< of each step
  bool reduce_each = false;  ///< instead of the last one of a step
  bool two_forwards = false, in_place_zero = false;
  int unused = 0;  ///< 1: blocks are skipped, the same on all ranks, 2: on each rank others
  int overflow_step = -1, overflow_rank = 0;
  Fault fault = Fault::kNone;
  int fault_step = 0, fault_rank = 0,
      fault_part = 0;  ///< of the first phase: its data rank, and which of its ranks
  std::uint64_t skips = 0;

  /// Whether the exception ends the training: other ranks are in operations that need the rank.
  bool ends() const;
  /// Whether the pass of that data rank skips the block. `step` counts over phases.
  bool skipped(std::size_t block, int rank, int step, int pass) const;
  bool last_pass(int pass) const { return pass + 1 == passes; }
  bool reduced(int pass) const { return reduce_each || last_pass(pass); }
  bool live(const Phase& phase, int rank, int step) const {
    return phase.batches.empty() || step < phase.batches[static_cast<std::size_t>(rank)];
  }
  /// Whether a rank throws in that step, and the ranks skip it.
  bool faulty(int step) const { return fault != Fault::kNone && !ends() && step == fault_step; }
  double rate(int group, int step) const;
  double norm_type() const;

 private:
  void choose_model(Choices& choices);
  void choose_training(Choices& choices);
  void choose_events(Choices& choices);
  bool any(bool (*condition)(const Phase& phase)) const;
  bool every(bool (*condition)(const Phase& phase)) const;
  bool only_replicas() const;
  bool wrapped() const;
};

/// What a rank throws.
inline constexpr const char* kThrown = "it threw";
inline constexpr double kMaxNorm = 0.4;
inline constexpr double kInitialScale = 8;
inline constexpr int kGrowthInterval = 2;

}  // namespace torchspan::combinations
