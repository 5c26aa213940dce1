#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "net/api/sim.h"

namespace torchspan::net {

/// What the injected faults do to one message.
struct Delivery {
  bool dropped = false;
  bool held = false;       ///< until unblock()
  bool hold_rest = false;  ///< everything after it is held, too
  Duration extra{0};
};

/// The predicates and counters of a simulated network. Predicates run without any lock held.
class FaultInjection {
 public:
  void block(SimPredicate match);
  void block_after(SimPredicate match);
  void unblock();
  void drop_if(SimPredicate match);
  void delay_if(SimPredicate match, Duration extra);
  void observe(std::function<void(const SimMessage&)> observer);

  /// Passes the message to the observer and the predicates.
  Delivery decide(const SimMessage& message);

 private:
  struct Rules {
    std::vector<SimPredicate> blocks;
    std::vector<std::pair<std::uint64_t, SimPredicate>> blocks_after;  ///< with an id; each applies once
    SimPredicate drop;
    SimPredicate delay;
    Duration extra{0};
    std::function<void(const SimMessage&)> observer;
  };
  template <class Change>
  void change(Change change);
  bool use_up(std::uint64_t id);

  mutable Mutex mutex_;
  std::shared_ptr<const Rules> rules_ TORCHSPAN_GUARDED_BY(mutex_) = std::make_shared<Rules>();
  std::uint64_t next_id_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchspan::net
