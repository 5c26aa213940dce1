#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/autograd/context.h>
#include <torchspan/core/error.h>
#include <torchspan/core/mutex.h>
#include <torchspan/engine/gradient_map.h>

#include "autograd/nodes.h"

namespace torchspan::autograd {

class PassState;

/// The rank in the high bits of every id: of the worker that made it.
constexpr std::uint32_t maker_of(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 48); }

/// One worker's part of a context: the sends of its forward passes, the gradients of its parameters, the
/// workers it dealt with, and the pass that runs. Thread-safe.
class ContextState {
 public:
  explicit ContextState(std::uint64_t id) : id_(id) {}

  std::uint64_t id() const { return id_; }
  engine::GradientMap& gradients() { return gradients_; }

  void add_send(const std::shared_ptr<SendNode>& send);
  void remove_send(std::uint64_t message);
  /// Null when there is none.
  std::shared_ptr<SendNode> find_send(std::uint64_t message) const;
  std::vector<std::shared_ptr<SendNode>> sends() const;
  void remove_sends(const std::vector<std::shared_ptr<SendNode>>& sends);

  void add_taker(GradientTaker taker);
  /// Nothing when nobody took the gradient.
  std::optional<Future<void>> offer(const at::Tensor& parameter, at::Tensor& gradient) const;

  /// False when the context has ended: then whoever is dealt with will not hear of that from us.
  bool add_worker(std::uint32_t rank);
  std::set<std::uint32_t> workers() const;
  /// Whether a question to all comes here for the first time.
  bool is_first_of(std::uint64_t wave);

  /// Held while a pass begins here, until its graph has been counted: nobody finds a pass that cannot take
  /// gradients yet.
  Mutex& beginning() { return beginning_; }
  /// The pass that runs here, or null.
  std::shared_ptr<PassState> pass() const;
  /// Makes `pass` the one that runs; false when another one does. Throws Error{kCancelled} for a pass that is
  /// over here or was aborted before it was heard of, and Error{kInvalid} when the context is released.
  bool begin_pass(const std::shared_ptr<PassState>& pass);
  /// The pass is over, here at least: its late messages do not start it anew.
  void end_pass(std::uint64_t pass, const std::optional<Error>& failure);
  /// True the first time.
  bool release();

 private:
  struct Ended {
    std::uint64_t pass = 0;
    std::optional<Error> failure;
  };
  static constexpr std::size_t kWaves = 64;

  const std::uint64_t id_;
  engine::GradientMap gradients_;
  Mutex beginning_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<SendNode>> sends_ TORCHSPAN_GUARDED_BY(mutex_);
  std::set<std::uint32_t> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const GradientTaker>> takers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::shared_ptr<PassState> pass_ TORCHSPAN_GUARDED_BY(mutex_);
  /// By the worker that began them: a worker's passes in a context begin one after the other, with growing
  /// ids, so the last one that ended stands for all before it.
  std::map<std::uint32_t, Ended> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::uint64_t> waves_ TORCHSPAN_GUARDED_BY(mutex_);
  bool released_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

/// One pass's gradients: offered to the takers of the context, or kept there.
class ContextSink final : public engine::GradientSink {
 public:
  ContextSink(ContextState& context, std::uint64_t pass) : GradientSink(pass), context_(context) {}
  at::Tensor gradient(const at::Tensor& parameter) const override {
    return context_.gradients().gradient(parameter);
  }
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override;
  void replace(const at::Tensor& parameter, at::Tensor gradient) override {
    context_.gradients().replace(parameter, std::move(gradient));
  }

 private:
  ContextState& context_;
};

}  // namespace torchspan::autograd
