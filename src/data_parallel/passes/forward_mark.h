#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/reducer.h>

#include "core/api/step_part.h"
#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {

/// What backward passes need to know about the forward that they go through. Lives as long as its graph.
/// What changes in it is guarded by the ForwardLog.
struct ForwardRecord {
  bool synchronize = true;
  double divisor = 1;
  int leader = 0;
  std::vector<std::size_t> unused;    ///< slots that the outputs do not reach
  std::vector<bool> passed;           ///< by mark: a pass has gone through it
  std::vector<Future<void>> awaited;  ///< the first pass waits for these
  std::function<RoundTerms()> announce;
  StepPart part;         ///< in which the forward ran
  bool settled = false;  ///< a later reduction failed on all ranks, so no rank waits for this forward's
  bool skipped = false;  ///< the ranks agreed that no backward pass follows
  bool any_passed() const { return std::find(passed.begin(), passed.end(), true) != passed.end(); }
  bool all_passed() const { return std::find(passed.begin(), passed.end(), false) == passed.end(); }
};

/// The mark of a forward that a pass reaches.
struct Reached {
  std::size_t mark = 0;
  /// The pass goes through a derivative of the outputs: it gives gradients to any of the parameters.
  bool derivative = false;
};

/// Is notified of passes that go through marked outputs.
class MarkListener {
 public:
  virtual ~MarkListener() = default;
  virtual void mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                            Reached reached) = 0;
  /// The mark's graph is destroyed while an exception propagates on this thread, or was that of a layer of a pipeline.
  virtual void mark_dropped(const std::shared_ptr<ForwardRecord>& record, std::size_t mark) = 0;
};

struct MarkOptions {
  std::weak_ptr<MarkListener> listener;
  std::shared_ptr<engine::NativeEnginePasses> passes;
  /// One mark for all outputs: a pass through one of them gives the others undefined gradients, so it also
  /// reaches the parameters of outputs that the loss does not use.
  bool together = false;
};

/// Replaces the outputs that need gradients by stand-ins with the same memory, whose graphs begin with a mark.
/// Adds the marks to the record.
std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs,
                                     const std::shared_ptr<ForwardRecord>& record,
                                     const MarkOptions& options);

}  // namespace torchspan::data_parallel
