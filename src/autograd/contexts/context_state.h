#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/autograd.h>
#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "autograd/nodes.h"
#include "engine/api/graph_walk.h"

namespace torchspan::autograd {

/// A context's sends when a pass begins. Later sends do not take part in it.
struct PassSends {
  std::size_t count = 0;
  std::uint64_t end = 0;    ///< upper limit of their numbers, which count sends in the order of addition
  std::size_t counted = 0;  ///< nodes behind them that no earlier pass had counted
};

/// The send nodes of one worker's part of a context, and which of them earlier passes have used. Thread-safe.
class ContextSends {
 public:
  /// `call` is the number of the call whose arguments were sent; nullopt for a result.
  void add(const SendNodePtr& send, std::optional<std::uint64_t> call = std::nullopt);
  void remove(std::uint64_t message);
  /// Drops all sends; later ones are not added.
  void close();
  /// The result of that call has arrived.
  void call_answered(std::uint64_t call);
  /// Whether a send belongs to the arguments of a call that has no result yet.
  bool is_unanswered(std::uint64_t message) const;

  /// Throws Error{kInvalid} if there is none before `end`, or if an earlier pass used it up.
  SendNodePtr find(std::uint64_t message, std::uint64_t end = ~std::uint64_t{0}) const;
  std::vector<SendNodePtr> all() const;
  /// The messages of the sends before `end`.
  std::vector<MessageInfo> messages(std::uint64_t end = ~std::uint64_t{0}) const;
  /// The messages sent to that worker, as MessageInfo::text().
  std::set<std::string> calls_to(std::uint32_t rank) const;

  /// Counts the edges behind the sends added since the last call. Call it while a pass begins.
  PassSends count();
  /// How many edges lead to each node behind the sends that count() has counted.
  const std::shared_ptr<engine::EdgeCounts>& edges() const { return edges_; }
  /// The sends that no pass without `retain_graph` has traversed.
  std::vector<SendNodePtr> unused() const;
  /// Removes the sends that passes without `retain_graph` have traversed, when a FAST pass begins, which waits
  /// for all others. The caller destroys them, without holding a lock.
  std::vector<SendNodePtr> use_up_used();
  /// A pass without `retain_graph` has traversed this send. The last kUsed of them stay: the nodes behind them
  /// may have saved nothing, or another tensor of the message may lead elsewhere. Returns the send that was
  /// removed for it, or null. The caller destroys it, with its graph, where that may take long.
  [[nodiscard]] SendNodePtr use(const SendNode& send);
  /// Removes a send that a pass without `retain_graph` has traversed and still holds.
  void use_up(const SendNode& send);

 private:
  static constexpr std::size_t kUsed = 64, kUsedUp = 1024;
  struct Listed {
    SendNodePtr send;
    std::uint64_t number = 0;
    std::optional<std::uint64_t> call = std::nullopt;
  };
  SendNodePtr take_out(std::uint64_t message) TORCHSPAN_REQUIRES(mutex_);
  void remember_used_up(const MessageInfo& message) TORCHSPAN_REQUIRES(mutex_);

  const std::shared_ptr<engine::EdgeCounts> edges_ = std::make_shared<engine::EdgeCounts>();
  mutable Mutex mutex_;
  std::map<std::uint64_t, Listed> sends_ TORCHSPAN_GUARDED_BY(mutex_);
  bool closed_ TORCHSPAN_GUARDED_BY(mutex_) = false;
  std::uint64_t added_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::set<std::uint64_t> uncounted_ TORCHSPAN_GUARDED_BY(mutex_);   // of sends_, since count()
  std::set<std::uint64_t> unanswered_ TORCHSPAN_GUARDED_BY(mutex_);  // calls
  std::deque<std::uint64_t> used_ TORCHSPAN_GUARDED_BY(mutex_);      // of sends_, in the order of first use
  std::deque<MessageInfo> used_up_ TORCHSPAN_GUARDED_BY(mutex_);     // the most recent, for errors
};

class PassState;

/// The rank of the worker that made an id, which is in its high bits.
constexpr std::uint32_t maker_of(std::uint64_t id) { return static_cast<std::uint32_t>(id >> 48); }

/// Counts of one worker's part of a pass.
struct PassWork {
  std::uint64_t executed = 0;            ///< nodes
  std::uint64_t sent = 0, received = 0;  ///< messages with gradients
};

/// One worker's part of a context: the sends of its forward passes, the gradients of its parameters, the
/// workers it communicated with, and the running pass. Thread-safe.
class ContextState : public std::enable_shared_from_this<ContextState> {
 public:
  /// `worker` is the name of this worker.
  ContextState(std::uint64_t id, std::shared_ptr<const std::string> worker,
               std::shared_ptr<device::CopyStreams> copies)
      : id_(id), worker_(std::move(worker)), copies_(std::move(copies)), gradients_(copies_->events()) {}

  std::uint64_t id() const { return id_; }
  /// Identifies the worker among those of this process: the address of its name, which is shared.
  const void* worker() const { return worker_.get(); }
  const std::string& worker_name() const { return *worker_; }
  device::CopyStreams& copies() const { return *copies_; }
  const engine::GradientMap& gradients() const { return gradients_; }
  /// Changes the gradients for a pass. No effect if that pass has ended: a thread may still be in a node of a
  /// pass that has failed.
  void change_gradients(std::uint64_t pass, const std::function<void(engine::GradientMap&)>& change);
  /// Changes the gradients between passes. False, without effect, while a pass runs.
  bool change_gradients(const std::function<void(engine::GradientMap&)>& change);

  ContextSends& sends() { return sends_; }
  const ContextSends& sends() const { return sends_; }

  void add_taker(GradientTaker taker);
  /// Offers a gradient to the takers. Nullopt if none took it.
  std::optional<Future<void>> offer(std::uint64_t pass, const at::Tensor& parameter,
                                    at::Tensor& gradient) const;

  enum class Added : std::uint8_t {
    kBefore,
    kNow,    ///< for the first time
    kEnded,  ///< the context has ended, and this worker will not notify that worker
  };
  Added add_worker(std::uint32_t rank);
  std::set<std::uint32_t> workers() const;
  /// Whether a question to all workers has reached this one for the first time.
  bool is_first_of(std::uint64_t wave);

  /// Held while a pass begins here, until its graph has been counted, so that no thread finds a pass that
  /// cannot take gradients yet.
  Mutex& beginning() { return beginning_; }
  /// The running pass, or null.
  std::shared_ptr<PassState> pass() const;
  /// Drops a reference to the running pass, which is not the last one, because this object holds another.
  /// False, without effect, for a pass that does not run.
  bool drop_running(std::shared_ptr<PassState>& pass) const;
  /// Makes `pass` the running one; call it only if none runs. Throws Error{kCancelled} for a pass that has
  /// ended here or was aborted before it began here, and Error{kInvalid} if the context is released.
  void begin_pass(const std::shared_ptr<PassState>& pass);
  /// The pass has ended on this worker: late messages do not restart it. After a failure, `notified` completes
  /// when the workers that were notified of it have answered.
  void end_pass(std::uint64_t pass, const PassWork& work, const std::optional<Error>& failure,
                Future<void> notified = {});
  /// The same for a pass that has not begun here; it will not begin.
  void refuse_pass(std::uint64_t pass, const Error& failure);
  /// This worker's work for a pass that ended here, if it is the last one of its root.
  std::optional<PassWork> ended_pass(std::uint64_t pass) const;
  /// Completes when the workers that were notified of the passes that failed here have answered.
  Future<void> failures_notified() const;
  /// Whether a pass has begun here or was refused.
  bool saw_pass() const;
  /// Returns true on the first call.
  bool release();

 private:
  struct Ended {
    std::uint64_t pass = 0;
    PassWork work;
    std::optional<Error> failure;
    std::vector<Future<void>> notified;  // of failures, also of earlier passes
  };
  static constexpr std::size_t kWaves = 64, kRefused = 64;
  bool runs(std::uint64_t pass) const;

  const std::uint64_t id_;
  const std::shared_ptr<const std::string> worker_;
  const std::shared_ptr<device::CopyStreams> copies_;
  ContextSends sends_;
  Mutex changing_;  // held while gradients are changed; only mutex_ is taken under it
  engine::GradientMap gradients_;
  Mutex beginning_;
  mutable Mutex mutex_;
  std::set<std::uint32_t> workers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<const GradientTaker>> takers_ TORCHSPAN_GUARDED_BY(mutex_);
  std::shared_ptr<PassState> pass_ TORCHSPAN_GUARDED_BY(mutex_);
  // By root: the passes of one root in a context begin one after another with increasing ids, so the last one
  // that ended represents all before it.
  std::map<std::uint32_t, Ended> ended_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::pair<std::uint64_t, Error>> refused_ TORCHSPAN_GUARDED_BY(mutex_);
  std::deque<std::uint64_t> waves_ TORCHSPAN_GUARDED_BY(mutex_);
  bool released_ TORCHSPAN_GUARDED_BY(mutex_) = false;
};

}  // namespace torchspan::autograd
