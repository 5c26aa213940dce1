#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/data_parallel/reducer.h>

#include "engine/api/grad_field_sink.h"

namespace torchspan::data_parallel {

/// What one forward left behind for the backward passes through its outputs; alive as long as their graph.
/// What changes in it is guarded by the ForwardLog.
struct ForwardRecord {
  bool synchronize = true;
  double divisor = 1;
  int leader = 0;
  std::vector<std::size_t> unused;    ///< slots that the outputs do not reach
  std::vector<bool> passed;           ///< by mark: a pass has come through it
  std::vector<Future<void>> awaited;  ///< the first pass does not end before
  std::function<RoundTerms()> announce;
  bool told = false;  ///< a reduction has failed on all ranks since: nobody waits for this one's
  bool any_passed() const { return std::find(passed.begin(), passed.end(), true) != passed.end(); }
  bool all_passed() const { return std::find(passed.begin(), passed.end(), false) == passed.end(); }
};

/// Hears of the passes that come through marked outputs.
class MarkListener {
 public:
  virtual ~MarkListener() = default;
  virtual void mark_reached(engine::GradientSink& sink, const std::shared_ptr<ForwardRecord>& record,
                            std::size_t mark) = 0;
  /// The mark's graph ends while an exception is under way on this thread.
  virtual void mark_dropped(const std::shared_ptr<ForwardRecord>& record) = 0;
};

struct MarkOptions {
  std::weak_ptr<MarkListener> listener;
  std::shared_ptr<engine::NativeEnginePasses> passes;
  /// One mark for all outputs: a pass through one gives the others undefined gradients, so that parameters
  /// behind outputs that the loss leaves out are told as well.
  bool together = false;
};

/// Stand-ins for the outputs that need gradients, of the same memory, whose history begins with a mark;
/// others as they are. Gives the record its marks.
std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs,
                                     const std::shared_ptr<ForwardRecord>& record,
                                     const MarkOptions& options);

}  // namespace torchspan::data_parallel
