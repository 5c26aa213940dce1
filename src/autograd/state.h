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
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_map.h>

#include "autograd/nodes.h"
#include "engine/api/edge_counts.h"

namespace torchspan::autograd {

class PassState;

/// The rank in the high bits of every id: of the worker that made it.
constexpr std::uint32_t maker_of(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 48); }

/// Counts of one worker's part of a pass.
struct PassWork {
  std::uint64_t executed = 0;            ///< nodes
  std::uint64_t sent = 0, received = 0;  ///< messages with gradients
};

/// What a pass finds of a context's sends when it begins; those that come later are none of it.
struct Sends {
  std::size_t count = 0;
  std::uint64_t end = 0;    ///< of their numbers in the order in which they were added
  std::size_t counted = 0;  ///< nodes behind them that no earlier pass had counted
};

/// One worker's part of a context: the sends of its forward passes, the gradients of its parameters, the
/// workers it dealt with, and the pass that runs. Thread-safe.
class ContextState : public std::enable_shared_from_this<ContextState> {
 public:
  /// `worker` is the name of the worker whose part this is.
  ContextState(std::uint64_t id, std::shared_ptr<const std::string> worker)
      : id_(id), worker_(std::move(worker)) {}

  std::uint64_t id() const { return id_; }
  /// Identifies the worker among those of this process: the address of its one name.
  const void* worker() const { return worker_.get(); }
  const std::string& worker_name() const { return *worker_; }
  const engine::GradientMap& gradients() const { return gradients_; }
  /// Changes the gradients on behalf of a pass. Nothing when that pass does not run any more: a thread may
  /// still be in a node of a pass that has failed.
  void change_gradients(std::uint64_t pass, const std::function<void(engine::GradientMap&)>& change);
  /// Forgets them; false when a pass runs.
  bool clear_gradients();

  /// `call`: the number of the call whose arguments it is.
  void add_send(const std::shared_ptr<SendNode>& send, std::optional<std::uint64_t> call = std::nullopt);
  /// The result of that call came.
  void call_answered(std::uint64_t call);
  /// Whether a send is the arguments of a call of which no result came.
  bool is_unanswered(std::uint64_t message) const;
  void remove_send(std::uint64_t message);
  /// Throws Error{kInvalid} when there is none before `end`, or when an earlier pass used it up.
  std::shared_ptr<SendNode> find_send(std::uint64_t message, std::uint64_t end = ~std::uint64_t{0}) const;
  std::vector<std::shared_ptr<SendNode>> sends() const;
  /// Those of sends() before `end`.
  std::vector<MessageInfo> messages(std::uint64_t end) const;
  /// What travelled to that worker, as MessageInfo::text() says.
  std::set<std::string> calls_to(std::uint32_t rank) const;
  /// Counts the edges behind the sends that have come since it was last called. While a pass begins.
  Sends count_sends();
  /// The edges that lead to each node behind the sends, as far as they were counted.
  const std::shared_ptr<engine::EdgeCounts>& edges() const { return edges_; }
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
  std::optional<Future<void>> offer(std::uint64_t pass, const at::Tensor& parameter,
                                    at::Tensor& gradient) const;

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
  /// Makes `pass` the one that runs, where none does. Throws Error{kCancelled} for a pass that is over here
  /// or was aborted before it was heard of, and Error{kInvalid} when the context is released.
  void begin_pass(const std::shared_ptr<PassState>& pass);
  /// The pass is over, here at least: its late messages do not start it anew.
  void end_pass(std::uint64_t pass, const PassWork& work, const std::optional<Error>& failure);
  /// The same for a pass that has not begun here, and shall not.
  void refuse_pass(std::uint64_t pass, const Error& failure);
  /// What this worker did for a pass that ended here, the last one of whoever began it.
  std::optional<PassWork> ended_pass(std::uint64_t pass) const;
  /// Whether a pass runs here, or did, or was refused.
  bool saw_pass() const;
  /// True the first time.
  bool release();

 private:
  struct Ended {
    std::uint64_t pass = 0;
    PassWork work;
    std::optional<Error> failure;
  };
  static constexpr std::size_t kWaves = 64, kUsed = 64, kUsedUp = 1024, kRefused = 64;
  struct Listed {
    std::shared_ptr<SendNode> send;
    std::uint64_t number = 0;
    std::optional<std::uint64_t> call = std::nullopt;
  };
  bool runs(std::uint64_t pass) const;
  std::shared_ptr<SendNode> take_out(std::uint64_t message) TORCHSPAN_REQUIRES(mutex_);
  void remember_used_up(const MessageInfo& message) TORCHSPAN_REQUIRES(mutex_);

  const std::uint64_t id_;
  const std::shared_ptr<const std::string> worker_;
  const std::shared_ptr<engine::EdgeCounts> edges_ = std::make_shared<engine::EdgeCounts>();
  Mutex changing_;  ///< held while gradients are changed; never together with another but mutex_ inside it
  engine::GradientMap gradients_;
  Mutex beginning_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, Listed> sends_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t added_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::set<std::uint64_t> uncounted_ TORCHSPAN_GUARDED_BY(mutex_);   // of sends_: for count_sends()
  std::set<std::uint64_t> unanswered_ TORCHSPAN_GUARDED_BY(mutex_);  // calls
  std::deque<std::uint64_t> used_ TORCHSPAN_GUARDED_BY(mutex_);      // of those, in the order of first use
  std::deque<MessageInfo> used_up_ TORCHSPAN_GUARDED_BY(mutex_);     // the last ones, for errors
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
  /// Completes, without failure, when those who took gradients are done with what they took.
  Future<void> takers_done() const;

 private:
  ContextState& context_;
  mutable Mutex mutex_;
  std::vector<Future<void>> taken_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::autograd
