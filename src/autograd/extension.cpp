#include <fmt/format.h>

#include <torchspan/detail/autograd/extension.h>

#include "autograd/extension_impl.h"

namespace torchspan::autograd {

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
  throw Error(ErrorKind::kInvalid,
              fmt::format("this worker has no autograd context {:#x}: it did not take part in it, "
                          "or the context has ended",
                          id));
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

}  // namespace torchspan::autograd
