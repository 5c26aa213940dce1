#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "autograd/messages/answer.h"
#include "autograd/messages/messages.h"
#include "autograd/passes/pass_parts.h"

namespace torchspan::autograd {

/// Ends one worker's part of a pass: when its graph is done and everything that called enter() has left, or
/// at the first failure. A failure is sent to all workers that this one communicated with in the context.
/// Thread-safe.
class PassEnding {
 public:
  /// Where fail() closes the pass's graph, which runs callbacks of the program and destroys its objects.
  enum class Close : std::uint8_t { kHere, kOnPool };

  explicit PassEnding(const PassParts& parts);

  /// Observes the end of the graph's work. Once, before the graph is prepared.
  void watch_graph();
  /// Delays the end until leave(). Throws the failure, or Error{kCancelled} after the end.
  void enter();
  void leave();

  /// Ends the pass with its first failure; ignored after the end.
  void fail(const Error& failure, Close close = Close::kHere);
  /// The same for a failure on this worker: adds the worker's name.
  void fail_here(const Error& cause, Close close = Close::kHere);
  /// The same for a node of this worker's graph that failed.
  void fail_in_node();
  /// The same for a worker that is gone or cannot be reached: names the calls between it and this worker,
  /// `through` among them.
  void fail_without(std::uint32_t rank, const Error& cause, const std::string& through = "",
                    Close close = Close::kHere);
  /// Fails the pass on the program's behalf, on another thread.
  void cancel();

  std::optional<Error> failure() const;
  /// Completes when this worker's part has ended, including the answers to its gradients, or has failed.
  Future<void> over() const { return over_.future(); }
  /// After a failure: completes when all workers that were notified of it have answered.
  Future<void> notified() const;
  /// Gives `answer` when this worker's part has ended or failed.
  void answer_when_over(Answer<PropagateGradients> answer);

 private:
  enum class Stage : std::uint8_t { kRunning, kGraphDone, kOver, kEnded, kFailed };

  void work_over(const engine::PassStatus& status);
  void end(const engine::PassStatus& status);
  void close(const Error& failure, std::optional<Promise<void>> left);
  /// Adds this worker's part to the metrics and takes it out of the context; see ContextState::end_pass().
  void leave_context(const std::optional<Error>& failure, Future<void> notified = {});
  Future<void> notify_others(const Error& failure);

  const PassParts parts_;
  Promise<void> over_;
  mutable Mutex mutex_;
  Stage stage_ TORCHSPAN_GUARDED_BY(mutex_) = Stage::kRunning;
  std::size_t inside_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::optional<Promise<void>> all_left_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Answer<PropagateGradients>> answer_ TORCHSPAN_GUARDED_BY(mutex_);
  Future<void> notified_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
