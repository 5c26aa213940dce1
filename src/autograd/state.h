#pragma once
#include <cstdint>
#include <deque>
#include <functional>
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

/// Counts of one worker's part of a pass.
struct PassWork {
  std::uint64_t executed = 0;            ///< nodes
  std::uint64_t sent = 0, received = 0;  ///< messages with gradients
};

/// One worker's part of a context: the sends of its forward passes, the gradients of its parameters, the
/// workers it dealt with, and the pass that runs. Thread-safe.
class ContextState {
 public:
  explicit ContextState(std::uint64_t id) : id_(id) {}

  std::uint64_t id() const { return id_; }
  const engine::GradientMap& gradients() const { return gradients_; }
  /// Changes the gradients on behalf of a pass. Nothing when that pass does not run any more: a thread may
  /// still be in a node of a pass that has failed.
  void change_gradients(std::uint64_t pass, const std::function<void(engine::GradientMap&)>& change);
  /// Forgets them; false when a pass runs.
  bool clear_gradients();

  void add_send(const std::shared_ptr<SendNode>& send);
  void remove_send(std::uint64_t message);
  /// Throws Error{kInvalid} when there is none, or when an earlier pass used it up.
  std::shared_ptr<SendNode> find_send(std::uint64_t message) const;
  std::vector<std::shared_ptr<SendNode>> sends() const;
  /// Those that no pass without `retain_graph` has gone through.
  std::vector<std::shared_ptr<SendNode>> unused_sends() const;
  /// Uses up what passes that keep no graph have gone through: a pass in FAST mode begins, which waits for
  /// all others. Whoever calls this drops them, under no lock.
  std::vector<std::shared_ptr<SendNode>> use_up_used();
  /// A pass that keeps no graph has gone through this send. The last kUsed of them stay: what lies behind may
  /// have needed nothing that was saved, or another tensor of the message may lead elsewhere.
  void use(const SendNode& send);
  /// The same; it does not stay.
  void use_up(const SendNode& send);

  void add_taker(GradientTaker taker);
  /// Nothing when nobody took the gradient.
  std::optional<Future<void>> offer(const at::Tensor& parameter, at::Tensor& gradient) const;

  enum class Dealt : std::uint8_t {
    kBefore,
    kNow,    ///< for the first time
    kEnded,  ///< the context has ended, and whoever is dealt with will not hear of that from us
  };
  Dealt add_worker(std::uint32_t rank);
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
  void end_pass(std::uint64_t pass, const PassWork& work, const std::optional<Error>& failure);
  /// The same for a pass that has not begun here, and shall not.
  void refuse_pass(std::uint64_t pass, const Error& failure);
  /// What this worker did for a pass that ended here, the last one of whoever began it.
  std::optional<PassWork> ended_pass(std::uint64_t pass) const;
  /// True the first time.
  bool release();

 private:
  struct Ended {
    std::uint64_t pass = 0;
    PassWork work;
    std::optional<Error> failure;
  };
  static constexpr std::size_t kWaves = 64, kUsed = 64, kUsedUp = 1024, kRefused = 64;
  bool runs(std::uint64_t pass) const;
  std::shared_ptr<SendNode> take_out(std::uint64_t message) TORCHSPAN_REQUIRES(mutex_);
  void remember_used_up(const MessageInfo& message) TORCHSPAN_REQUIRES(mutex_);

  const std::uint64_t id_;
  Mutex changing_;  ///< held while gradients are changed; never together with another but mutex_ inside it
  engine::GradientMap gradients_;
  Mutex beginning_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, std::shared_ptr<SendNode>> sends_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::uint64_t> used_ TORCHSPAN_GUARDED_BY(mutex_);   // of those, in the order of first use
  std::deque<MessageInfo> used_up_ TORCHSPAN_GUARDED_BY(mutex_);  // the last ones, for errors
  std::set<std::uint32_t> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const GradientTaker>> takers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::shared_ptr<PassState> pass_ TORCHSPAN_GUARDED_BY(mutex_);
  /// By the worker that began them: a worker's passes in a context begin one after the other, with growing
  /// ids, so the last one that ended stands for all before it.
  std::map<std::uint32_t, Ended> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::pair<std::uint64_t, Error>> refused_ TORCHSPAN_GUARDED_BY(mutex_);
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
  void replace(const at::Tensor& parameter, at::Tensor gradient) override;

 private:
  ContextState& context_;
};

}  // namespace torchspan::autograd
