#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <torchspan/detail/autograd/extension.h>

#include "autograd/interceptor.h"
#include "autograd/messages.h"
#include "autograd/pass.h"
#include "autograd/survey.h"
#include "core/api/rate_limited_warning.h"

namespace torchspan::autograd {

/// The worker's side of the protocol: starts passes, serves gradients and marks, aborts, releases, answers
/// questions. Thread-safe.
class AutogradExtension::Impl : public std::enable_shared_from_this<AutogradExtension::Impl> {
 public:
  explicit Impl(rpc::Registrar& registrar);

  Worker require_worker() const;
  void serve(rpc::Registrar& registrar);

  void backward(const std::shared_ptr<ContextState>& context, const std::vector<at::Tensor>& roots,
                const BackwardOptions& options);
  ContextGraph graph(const std::shared_ptr<ContextState>& context, const std::vector<at::Tensor>& roots);
  /// A context that `peer` works in; see AutogradExtension::join().
  std::shared_ptr<ContextState> join_context(std::uint64_t id, std::uint32_t peer);
  /// Completes when everybody who took part has let go of the context; at once where it is gone already, so
  /// that those who tell each other do not wait for each other.
  Future<void> release(std::uint64_t id);
  /// The same of a release that began before.
  Future<void> released(std::uint64_t id);
  void release_told(std::uint32_t peer, ReleaseContext message, Answer<ReleaseContext> answer);
  void abort_all(const Error& error);
  /// In a pass, LibTorch's engine put the gradients of these into `.grad`.
  void warn_of_stray_gradients(const std::vector<at::Tensor>& parameters);

  const std::weak_ptr<rpc::Endpoint> worker;
  const std::weak_ptr<FutureHost> host;
  const std::shared_ptr<Registry> registry;
  EdgeInterceptor interceptor;

 private:
  /// How long the root waits for the answers to a question to all.
  static constexpr Duration kPatience = std::chrono::seconds(1);

  /// Serves M by a handler that gives the answer at once or keeps it.
  template <rpc::Message M>
  void serve_step(rpc::Registrar& registrar, void (Impl::*handler)(std::uint32_t peer, M, Answer<M>),
                  rpc::RunOn where);
  std::shared_ptr<PassState> join(std::uint64_t context_id, const PassKey& key, std::uint32_t peer);
  std::shared_ptr<PassState> try_join(const std::shared_ptr<ContextState>& context, const PassKey& key,
                                      std::shared_ptr<PassState>& superseded);
  void propagate(std::uint32_t peer, PropagateGradients message, Answer<PropagateGradients> answer);
  void mark(std::uint32_t peer, MarkSends message, Answer<MarkSends> answer);
  void mark_slowly(std::uint32_t peer, const MarkSends& message, Answer<MarkSends> answer);
  void marks_are_final(std::uint32_t peer, const MarksFinal& message);
  Future<Unit> abort(const AbortPass& message);
  void ask_pass(std::uint32_t peer, AskPass message, Answer<AskPass> answer);
  void ask_graph(std::uint32_t peer, AskGraph message, Answer<AskGraph> answer);
  bool adopt(const rpc::CallInfo& call, const AdoptMember& message);
  void depart(std::uint32_t rank, const Error& reason);
  /// A worker that this one dealt with in the context is gone: lets go of the context if that was its maker,
  /// else asks the maker to be told of its end.
  void lost_touch(const std::shared_ptr<ContextState>& context);
  Future<void> releases_under_way();
  std::shared_ptr<PassState> begin(const std::shared_ptr<ContextState>& context,
                                   const BackwardOptions& options);
  void wait(ContextState& context, PassState& pass, const BackwardOptions& options);
  Survey survey(ContextState& context, const PassState& pass);
  Future<std::vector<PartReport>> ask_about(ContextState& context, const AskPass& question) const;
  PartReport report_of(ContextState& context, std::uint64_t pass) const;

  Metrics& metrics_;
  RateLimitedWarning stray_gradients_;
  Mutex mutex_;
  std::map<std::uint64_t, Future<void>> releases_ TORCHSPAN_GUARDED_BY(mutex_);  ///< under way, by context
};

}  // namespace torchspan::autograd
