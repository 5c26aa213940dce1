#include <fmt/format.h>
#include <utility>

#include <torchspan/detail/autograd/extension.h>

#include "autograd/api/running_passes.h"
#include "autograd/extension_impl.h"
#include "autograd/passes/pass_state.h"
#include "core/api/throw_invalid.h"

namespace torchspan::autograd {

AutogradExtension::Impl::Impl(rpc::Registrar& registrar)
    : worker_(registrar.worker()),
      registry_(std::make_shared<Registry>(
          registrar.worker().name(), [worker = worker_] { return worker.require().backend()->next_id(); })),
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
  registrar.on_departure([registry = std::weak_ptr(registry_), passes = std::weak_ptr(passes_),
                          contexts = std::weak_ptr(contexts_)](std::uint32_t rank, const Error& reason) {
    auto all = require_alive(registry)->all();
    require_alive(passes)->worker_departed(all, rank, reason);
    require_alive(contexts)->worker_departed(std::move(all), rank);
  });
}

AutogradExtension::AutogradExtension() = default;

AutogradExtension::~AutogradExtension() {
  if (impl_)
    impl_->passes().abort_all(
        Error(ErrorKind::kCancelled, "this worker was shut down during a backward pass"));
}

void AutogradExtension::attach(rpc::Registrar& registrar) { impl_ = std::make_shared<Impl>(registrar); }

std::optional<ContextView> AutogradExtension::try_find(std::uint64_t id) const {
  auto state = impl_->registry()->find(id);
  if (!state) return std::nullopt;
  return ContextView(impl_->require_worker(), std::move(state));
}

ContextView AutogradExtension::find(std::uint64_t id) const {
  if (auto context = try_find(id)) return *context;
  throw_invalid(
      "this worker has no autograd context {:#x}: it did not take part in it, or the context has ended", id);
}

ContextView AutogradExtension::join(std::uint64_t id, std::uint32_t peer) {
  return ContextView(impl_->require_worker(), impl_->contexts().join(id, peer));
}

PassCounts AutogradExtension::counts() const {
  PassCounts counts;
  for (const auto& context : impl_->registry()->all()) {
    ++counts.contexts;
    if (context->pass()) ++counts.passes;
  }
  counts.remembered = impl_->registry()->remembered();
  return counts;
}

namespace {

std::string describe_waiting(const WaitingSend& send) {
  return fmt::format("the gradient of the {} of '{}', sent to {}{}{}", send.reply ? "result" : "arguments",
                     send.call, send.to, send.site.empty() ? "" : fmt::format(" at {}", send.site),
                     send.unanswered ? " (that call has no result)" : "");
}

/// Throws if the worker has ended.
std::vector<RunningPass> find_passes(const Worker& worker) {
  std::vector<RunningPass> running;
  for (const auto& context : worker.extension<AutogradExtension>().impl()->registry()->all()) {
    auto pass = context->pass();
    if (!pass) continue;
    const PartReport report = pass->report();
    RunningPass& mine = running.emplace_back();
    mine.id = pass->id();
    mine.busy = report.busy;
    for (const WaitingSend& send : report.waiting) mine.waits.push_back(describe_waiting(send));
    PassState::release_on_pool(std::move(pass));
  }
  return running;
}

}  // namespace

std::vector<RunningPass> running_passes(const Worker& worker) {
  try {
    return find_passes(worker);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace torchspan::autograd
