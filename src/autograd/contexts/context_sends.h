#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "autograd/nodes/nodes.h"
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

}  // namespace torchspan::autograd
