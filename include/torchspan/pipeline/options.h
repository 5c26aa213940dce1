#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>

namespace torchspan::pipeline {

/// What decides the next task of a stage.
enum class Schedule : std::uint8_t {
  kArrival,      ///< the order of arrival: work is done as it comes
  kGPipe,        ///< all forwards, then all backwards
  k1F1B,         ///< a backward as soon as one is ready; bounded memory
  kInterleaved,  ///< several stages a worker; a smaller bubble
};

/// Which micro-batches keep only their inputs and are computed again for their backward.
enum class Checkpoint : std::uint8_t { kNever, kExceptLast, kAlways };

struct PipelineOptions {
  std::vector<int> balance = {};  ///< distinct layers of each stage; empty: evenly over `workers`
  /// The owner of each stage; empty: stage s on rank s modulo the world's size.
  std::vector<std::string> workers = {};
  int micro_batches = 1;  ///< a batch with fewer rows is split into fewer
  Schedule schedule = Schedule::k1F1B;
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  /// The most micro-batches between their first forward and their last backward; 0: what the schedule needs
  /// (kArrival: twice the number of workers). Bounds memory; kGPipe takes no notice of it.
  int max_in_flight = 0;
  /// Seeds the initial weights of every layer by (seed, layer), and the random numbers of every use and of
  /// the loss by (seed, step, order, micro-batch): neither depends on how the model is split, nor dropout on
  /// the schedule. Unset: weights follow from a number that the first worker's generator draws when the
  /// pipeline is made, uses draw from each worker's own generator.
  std::optional<std::uint64_t> seed = {};
  /// A task, or a worker that does not come to the step, may take so long; then the step fails everywhere.
  Duration stall_timeout = std::chrono::minutes(10);
  std::string name = "pipeline";  ///< in errors; tells the pipelines of one set of workers apart
};

/// What one step may have of its own.
struct StepOptions {
  /// The loss is multiplied by it before its backward: 1/k accumulates the mean over k steps.
  double gradient_scale = 1;
  /// On the worker of the first segment: its first backward waits for it, so that one controller may see all
  /// forwards done first.
  Future<void> before_first_backward = {};
};

/// What LibTorch's generator is seeded with before a use of a layer, under PipelineOptions::seed: for whoever
/// wants the same numbers in one process. Steps and orders count from 0; the loss has the order after the
/// last use.
std::uint64_t seed_of_use(std::uint64_t seed, std::uint64_t step, int order, int micro_batch);
/// The same before layer number `layer`, counting from 0, is built.
std::uint64_t seed_of_layer(std::uint64_t seed, int layer);

}  // namespace torchspan::pipeline
