#pragma once
#include <memory>

#include <torchspan/core/future.h>
#include <torchspan/detail/core/function.h>

#include "autograd/contexts/context_state.h"

namespace torchspan::autograd {

/// What PassEnding and MarkExchange need of the PassState that owns them. It keeps the pass alive while other
/// threads work for it: a callback that holds a reference to the owner may use its members.
class PassOwner : public std::enable_shared_from_this<PassOwner> {
 public:
  explicit PassOwner(std::weak_ptr<FutureHost> host) : host_(std::move(host)) {}
  virtual ~PassOwner() = default;
  PassOwner(const PassOwner&) = delete;
  PassOwner& operator=(const PassOwner&) = delete;

  /// Runs the nodes that are ready, on this thread.
  virtual void drive() = 0;
  /// Called once if the pass ends without failure, before the context is notified.
  virtual void finish() = 0;
  virtual PassWork work() const = 0;
  /// Drops `pass`, a reference to this object, if the context holds another. False, without effect, if not.
  virtual bool leave_to_context(std::shared_ptr<PassOwner>& pass) const = 0;

  /// Runs `act` on the worker's pool, or on this thread after the pool has stopped. Keeps the pass alive.
  void post(UniqueFunction<void()> act);
  /// Drops a reference on a thread that must not destroy graphs: the pool destroys the last one.
  static void release_on_pool(std::shared_ptr<PassOwner> pass);

 private:
  const std::weak_ptr<FutureHost> host_;
};

}  // namespace torchspan::autograd
