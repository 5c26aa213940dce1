#pragma once
#include <memory>
#include <optional>

#include <torchspan/autograd.h>
#include <torchspan/detail/rpc/extension.h>

namespace torchspan::autograd {

/// Number of contexts and running passes of a worker.
struct PassCounts {
  std::size_t contexts = 0;
  std::size_t passes = 0;
  std::size_t remembered = 0;  ///< ids of ended contexts, kept to reject late messages
};

/// Distributed autograd of one worker: an extension that a Session includes by default.
class AutogradExtension final : public rpc::Extension {
 public:
  AutogradExtension();
  ~AutogradExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// Finds a context by id. Throws Error{kInvalid} if this worker does not know it: it took no part in it,
  /// or the context was released.
  ContextView find(std::uint64_t context) const;
  /// Finds a context by id; nullopt if this worker does not know it.
  std::optional<ContextView> try_find(std::uint64_t context) const;
  /// Takes part in a context in which `peer` works, as a call from `peer` in that context would. For
  /// messages of other extensions that may arrive before such a call, sent after ContextView::add_worker().
  /// Throws Error{kInvalid} if the context has ended.
  ContextView join(std::uint64_t context, std::uint32_t peer);
  PassCounts counts() const;

  class Impl;
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::autograd
