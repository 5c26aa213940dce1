#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/core/time.h>

namespace torchspan::pipeline {

/// What determines the order of actions on a worker.
enum class Schedule : std::uint8_t {
  kArrival,      ///< runs actions in order of arrival
  kGPipe,        ///< all forwards, then all backwards
  k1F1B,         ///< runs a backward as soon as one is ready; bounded memory
  kInterleaved,  ///< several stages per worker; a smaller bubble
};

/// Which micro-batches keep only their inputs and recompute activations for the backward.
enum class ActivationCheckpoint : std::uint8_t { kNever, kExceptLast, kAlways };

struct PipelineOptions {
  std::vector<int> balance = {};  ///< distinct layers per stage; empty: even
  /// Owner of each stage; empty: stage s on rank s modulo the world size.
  std::vector<std::string> workers = {};
  int micro_batches = 1;  ///< upper bound; a small batch has fewer
  Schedule schedule = Schedule::k1F1B;
  ActivationCheckpoint checkpoint = ActivationCheckpoint::kExceptLast;
  /// Maximum number of micro-batches between their first forward and their last backward, which bounds
  /// memory; 0: what the schedule needs (kArrival: twice the number of workers). kGPipe ignores it.
  int max_in_flight = 0;
  /// Seeds the initial weights of each layer by (seed, layer), and the random numbers of each use and of
  /// the loss by (seed, step, order, micro-batch). Weights and dropout then do not depend on how the model
  /// is split or scheduled. Unset: weights derive from a number that the first worker draws when the
  /// pipeline is created, and uses draw from their worker's generator.
  std::optional<std::uint64_t> seed = {};
  /// Limit of one action, and of the wait for a worker to begin the step. After it the step fails on all
  /// workers.
  Duration stall_timeout = std::chrono::minutes(10);
  std::string name = "pipeline";  ///< in errors; unique among pipelines of one set of workers
};

/// Options of one step.
struct StepOptions {
  /// Factor of the loss before its backward; 1/k accumulates the mean over k steps.
  double gradient_scale = 1;
  /// On the worker of the first layer range: its first backward waits for this future, so that one
  /// controller can let all forwards finish first.
  Future<void> before_first_backward = {};
};

/// Seed of LibTorch's generator for one use of a layer under PipelineOptions::seed; use it to reproduce the
/// numbers in one process. Steps and orders count from 0; the loss has the order after the last use.
std::uint64_t seed_of_use(std::uint64_t seed, std::uint64_t step, int order, int micro_batch);
/// Seed for building layer number `layer`, counted from 0.
std::uint64_t seed_of_layer(std::uint64_t seed, int layer);

}  // namespace torchspan::pipeline
