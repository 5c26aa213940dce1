#pragma once
#include <memory>
#include <vector>

#include <torchspan/detail/autograd/extension.h>

#include "autograd/contexts/context_lifetimes.h"
#include "autograd/contexts/context_queries.h"
#include "autograd/messages/sending.h"
#include "autograd/nodes.h"
#include "autograd/passes/pass_graph.h"
#include "autograd/passes/pass_service.h"

namespace torchspan::autograd {

/// The objects that make up distributed autograd on one worker. Thread-safe.
class AutogradExtension::Impl {
 public:
  /// Connects the objects to the worker and serves their messages.
  explicit Impl(rpc::Registrar& registrar);

  Worker require_worker() const { return worker_.require(); }
  const std::shared_ptr<Registry>& registry() const { return registry_; }
  ContextLifetimes& contexts() { return *contexts_; }
  const ContextQueries& queries() const { return *queries_; }
  PassService& passes() { return *passes_; }
  StrayGradientWarning& stray_gradient_warning() { return stray_gradient_warning_; }

 private:
  const WeakWorker worker_;
  const std::shared_ptr<Registry> registry_;
  const std::shared_ptr<ContextLifetimes> contexts_;
  const std::shared_ptr<ContextQueries> queries_;
  const std::shared_ptr<PassService> passes_;
  EdgeInterceptor interceptor_;
  StrayGradientWarning stray_gradient_warning_;
};

}  // namespace torchspan::autograd
