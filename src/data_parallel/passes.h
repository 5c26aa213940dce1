#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/future.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "core/api/step_part.h"
#include "data_parallel/parameters.h"
#include "engine/api/grad_field_sink.h"

/// What a reducer knows of its forwards and of the backward passes through them. All of it is guarded by the reducer's lock.
namespace torchspan::data_parallel {

/// What backward passes need to know about the forward that they go through. Lives as long as its graph.
struct ForwardRecord {
  bool synchronize = true;
  RoundTerms terms;
  std::vector<std::size_t> unused;       ///< slots that the outputs do not reach
  std::vector<bool> passed;              ///< by mark: a pass has gone through it
  std::vector<Future<void>> awaited;     ///< the first pass waits for these
  std::function<RoundTerms()> announce;  ///< as in ForwardOptions
  StepPart part;                         ///< in which the forward ran
  bool settled = false;  ///< a later reduction failed on all ranks, so no rank waits for this forward's
  bool skipped = false;  ///< the ranks agreed that no backward pass follows

  bool any_passed() const { return std::find(passed.begin(), passed.end(), true) != passed.end(); }
  bool all_passed() const { return std::find(passed.begin(), passed.end(), false) == passed.end(); }
  /// Whether other ranks may wait for the reduction that belongs to the forward.
  bool is_awaited() const { return synchronize && !settled && !any_passed(); }
};
using ForwardPtr = std::shared_ptr<ForwardRecord>;

/// The mark of a forward that a pass reaches.
struct Reached {
  std::size_t mark = 0;
  /// The pass goes through a derivative of the outputs: it gives gradients to any of the parameters.
  bool derivative = false;
};

struct MarkOptions {
  std::weak_ptr<Reducer::Impl> reducer;  ///< gets mark_reached() and mark_dropped()
  std::shared_ptr<engine::NativeEnginePasses> passes;
  /// One mark for all outputs: a pass through one of them gives the others undefined gradients, so it also
  /// reaches the parameters of outputs that the loss does not use.
  bool together = false;
};

/// Replaces the outputs that need gradients by stand-ins with the same memory, whose graphs begin with a mark.
/// Adds the marks to the record.
std::vector<at::Tensor> mark_outputs(std::vector<at::Tensor> outputs, const ForwardPtr& record,
                                     const MarkOptions& options);

/// The forwards whose graphs are alive.
class Forwards {
 public:
  /// Adds a forward whose outputs were marked.
  void add(const ForwardPtr& record);
  /// Whether a forward other than `record` has marks that no pass has reached.
  bool others_unfinished(const ForwardPtr& record) const;
  /// A forward that is reduced and whose outputs are alive, but which no pass has reached; null if there is none.
  ForwardPtr unreached() const;

  /// An exception discarded the forward's outputs. Kept if other ranks wait for the forward's reduction.
  void note_dropped(const ForwardPtr& record);
  ForwardPtr take_dropped();
  /// A reduction failed on all ranks, so no rank waits for the reductions of earlier forwards. Returns what take_dropped()
  /// would: it may own the last handles of what awaits it, and is released without the lock.
  [[nodiscard]] ForwardPtr forget();
  /// The same, because the ranks agreed that the forwards so far are not reduced.
  [[nodiscard]] ForwardPtr skip();

 private:
  std::vector<std::weak_ptr<ForwardRecord>> records_;
  ForwardPtr dropped_;
};

/// The running pass that reduces nothing so far: its forward ran under no_sync, or it has not gone through a
/// marked output yet. It is a stray pass if it then has a gradient that no other wrapper expects from it. Records its
/// gradients in case it becomes a reduced one.
class LocalPass {
 public:
  explicit LocalPass(std::size_t slots) : arrived_(slots) {}

  /// The pass goes through an output that is not reduced. False if that is known already.
  bool begin(const std::shared_ptr<engine::PassEnd>& end);
  /// A gradient arrived, which another wrapper expects or not. True if the pass becomes a stray one by it.
  bool add(const std::shared_ptr<engine::PassEnd>& end, std::size_t slot, bool expected_elsewhere);
  /// No gradient of a pass has arrived, and none has begun.
  bool is_idle() const { return end_ == nullptr; }
  /// The pass went through an output that is not reduced.
  bool has_begun(const engine::PassEnd* end) const { return begun_ && end_.get() == end; }
  /// Returns the slots whose gradients arrived if `end` is that of this pass, and forgets the pass.
  std::vector<std::size_t> take(const std::shared_ptr<engine::PassEnd>& end);
  void forget(const engine::PassEnd* end);
  bool is_stray(const engine::PassEnd* end) const { return stray_ && end_.get() == end; }

 private:
  std::shared_ptr<engine::PassEnd> end_;
  bool begun_ = false, stray_ = false;
  std::vector<std::uint8_t> arrived_;  // by slot
};

/// How often each slot gets a gradient in one pass of a static graph: recorded in the first round, and
/// expected in the later ones.
class StaticGraph {
 public:
  explicit StaticGraph(std::size_t slots);

  /// Whether the first round has been recorded.
  bool is_known() const { return known_; }
  void begin_recording();
  void record(std::size_t slot);
  /// Returns all slots in the order of their last gradients; slots without gradients come first.
  std::vector<std::size_t> end_recording();
  /// Whether the recorded pass gave the slot a gradient.
  bool was_used(std::size_t slot) const { return expected_[slot] > 0; }

  /// Begins a pass like the recorded one. Returns the slots that get no gradient in it.
  std::vector<std::size_t> begin_pass();
  enum class Arrival : std::uint8_t { kMoreFollow, kLast, kTooMany };
  /// One more gradient of the slot arrived.
  Arrival arrive(std::size_t slot);

 private:
  bool known_ = false;
  std::uint32_t time_ = 0;                // number of recorded gradients
  std::vector<std::uint32_t> expected_;   // by slot: gradients per pass
  std::vector<std::uint32_t> last_;       // by slot: time of the last one
  std::vector<std::uint32_t> remaining_;  // by slot: still to come in this pass
};

/// Which gradients were undefined before the first pass since the last reduction. If the reduction fails, they become
/// undefined again, so that ranks have the same gradients defined, whichever passes each has run.
class UndefinedGradients {
 public:
  /// A pass begins that may fill `.grad`.
  void pass_begins(const ParameterSlots& slots, const engine::GradientSink& sink);
  /// The reduction is over. Returns the slots.
  std::vector<std::size_t> take();

 private:
  bool noted_ = false;
  std::vector<std::size_t> undefined_;  // slots
};

}  // namespace torchspan::data_parallel
