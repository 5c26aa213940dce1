#include "autograd/extension_impl.h"

#include "autograd/contexts/clear_gradients.h"
#include "autograd/passes/root_pass.h"

namespace torchspan::autograd {

AutogradExtension::Impl::Impl(rpc::Registrar& registrar)
    : worker_(registrar.worker()),
      registry_(std::make_shared<Registry>(
          registrar.worker().name(), [worker = worker_] { return worker.require().endpoint()->next_id(); })),
      contexts_(std::make_shared<ContextLifetimes>(worker_, registry_)),
      queries_(std::make_shared<ContextQueries>(worker_, registry_)),
      passes_(std::make_shared<PassService>(worker_, registry_)),
      interceptor_(registrar.runtime(), registry_),
      stray_gradient_warning_(registrar.runtime()) {
  registrar.intercept(interceptor_);
  interceptor_.when_peer_added([contexts = std::weak_ptr(contexts_)](
                                   const std::shared_ptr<ContextState>& context, std::uint32_t peer) {
    if (const auto alive = contexts.lock()) alive->add_peer(context, peer);
  });
  contexts_->serve(registrar);
  queries_->serve(registrar);
  passes_->serve(registrar);
  serve_clear_gradients(registrar, registry_);
  registrar.on_departure([registry = std::weak_ptr(registry_), passes = std::weak_ptr(passes_),
                          contexts = std::weak_ptr(contexts_)](std::uint32_t rank, const Error& reason) {
    auto all = require_alive(registry)->all();
    require_alive(passes)->worker_gone(all, rank, reason);
    require_alive(contexts)->worker_gone(std::move(all), rank);
  });
}

void AutogradExtension::Impl::backward(const std::shared_ptr<ContextState>& context,
                                       const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  const Worker me = worker_.require();
  RootPass(me, context, *registry_, *queries_).run(roots, options);
}

}  // namespace torchspan::autograd
