#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/policies/policy.h"
#include "pipeline/runtime/layer_range_pass.h"
#include "pipeline/runtime/local_pipeline.h"
#include "pipeline/runtime/shared_tensors.h"
#include "pipeline/runtime/watch.h"

namespace torchspan::pipeline {

/// What this worker brings to a step.
struct StepWork {
  StepBegin begin;
  const schedule::Table* table = nullptr;  ///< the order of actions; null: the order of arrival
  Batch input;                             ///< on the worker of the first layer range
  Batch target;                            ///< on that of the last, if there is a loss
  const Loss* loss = nullptr;
  Future<void> before_first_backward = {};
};

/// One step on one worker: the loop that takes events in, runs actions as the policy says, and posts what
/// comes of them. The same for the first, the last and every other worker. Used by the thread that trains.
class Step {
 public:
  Step(const LocalPipeline& local, StepWork work);

  std::uint64_t id() const { return work_.begin.id.step; }
  /// Runs actions until this worker's forwards (backwards) of a StepKind::kForward are done, or its part of any
  /// other step. Throws the error that ends the step, after telling the others if it began here.
  void run_part(bool backwards);
  /// Waits until every worker is done with its part.
  void meet();
  /// Gives the input its gradients; then the same at the end of the step.
  void close();

  /// The whole output, on the worker of the last layer range.
  Batch output();
  /// Gives the backwards the gradients of the whole output, one a member.
  void put_output_gradients(const std::vector<at::Tensor>& gradients);
  double loss() const { return loss_; }
  StepReport report() const;

 private:
  LayerRangePass& pass(int range, int micro_batch);
  std::unique_ptr<Policy> make_policy(bool backwards) const;
  int count_actions(bool backwards) const;
  void tell_policy(const schedule::Action& action);
  void feed_input();
  void check_forward(int range, int micro_batch);
  void check_backward(int range, int micro_batch);
  void run(const schedule::Action& action);
  void run_forward(int range, int micro_batch);
  void keep_output(int micro_batch, Activation activation);
  void run_backward(int range, int micro_batch);
  void deliver(int link, int micro_batch, Activation activation);
  void deliver_gradients(int link, int micro_batch, std::vector<at::Tensor> gradients);
  void finish_input_gradients();
  bool recompute_ahead();
  void wait();
  void take_events();
  void accept(Activations& event);
  void accept(Gradients& event);
  void accept(const PartDone& event);
  void accept(StepClosed& event);
  void hold_first_backward();
  void record(const schedule::Action& action, TimePoint start);
  std::string describe(const schedule::Action& action) const;
  std::string waiting_for() const;
  StepId step_id() const { return work_.begin.id; }
  int micro_batches() const { return static_cast<int>(work_.begin.rows.size()); }
  bool trains() const {
    return work_.begin.kind == StepKind::kTrain || work_.begin.kind == StepKind::kForward;
  }

  const LocalPipeline& local_;
  StepWork work_;
  const TimePoint start_;
  Watch watch_;
  const ConstantsWatch constants_;
  std::vector<std::int64_t> first_row_;
  std::unique_ptr<Policy> policy_;
  std::map<std::pair<int, int>, std::unique_ptr<LayerRangePass>> passes_;
  std::vector<schedule::Action> ready_early_;  ///< backwards that can run before their part has begun
  bool backwards_allowed_ = false;
  bool backwards_begun_ = false;
  int actions_left_ = 0;
  int live_ = 0;
  int peak_ = 0;
  std::vector<RanAction> ran_;
  double loss_ = 0;
  std::vector<Batch> outputs_;  ///< by micro-batch, until output()
  /// By micro-batch and member of the output: its rows, or -1 for a tensor without, and whether it wants a
  /// gradient.
  std::vector<std::vector<std::int64_t>> output_rows_;
  std::vector<std::vector<std::uint8_t>> output_wants_;
  std::map<int, std::vector<at::Tensor>> input_gradients_;  ///< by micro-batch
  int parts_done_ = 0;
  bool closed_ = false;
  StepClosed closing_;  ///< filled as parts are done, on the first worker
};

}  // namespace torchspan::pipeline
