#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <torchspan/core/future.h>
#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/context_lifetimes.h"
#include "autograd/contexts/context_state.h"
#include "autograd/messages/messages.h"
#include "autograd/messages/sending.h"
#include "autograd/passes/pass_state.h"

namespace torchspan::autograd {

/// Serves the messages of passes that other workers began or take part in: finds or begins this worker's part
/// and hands the message to it. Thread-safe.
class PassService : public std::enable_shared_from_this<PassService> {
 public:
  PassService(WeakWorker worker, std::shared_ptr<Registry> registry)
      : worker_(std::move(worker)), registry_(std::move(registry)) {}
  void serve(rpc::Registrar& registrar);

  /// Fails all passes on this worker.
  void abort_all(const Error& error);
  /// A worker has died or left: fails the passes that need it. Runs no user code and destroys no graphs on
  /// this thread, which has other workers to notify.
  void worker_departed(const std::vector<std::shared_ptr<ContextState>>& contexts, std::uint32_t rank,
                       const Error& reason);

 private:
  void check_process(std::uint64_t context, std::uint64_t message) const;
  std::shared_ptr<PassState> join(std::uint64_t context_id, const PassKey& key, std::uint32_t peer);
  std::shared_ptr<PassState> try_join(const std::shared_ptr<ContextState>& context, const PassKey& key,
                                      std::shared_ptr<PassState>& superseded);
  Error refuse(const std::shared_ptr<PassState>& pass) const;
  void propagate(std::uint32_t peer, PropagateGradients message, Answer<PropagateGradients> answer);
  void mark(std::uint32_t peer, MarkSends message, Answer<MarkSends> answer);
  void mark_on_pool(std::uint32_t peer, const MarkSends& message, Answer<MarkSends> answer);
  void marks_are_final(std::uint32_t peer, const MarksFinal& message);
  Future<Unit> abort(const AbortPass& message);

  const WeakWorker worker_;
  const std::shared_ptr<Registry> registry_;
};

}  // namespace torchspan::autograd
