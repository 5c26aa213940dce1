#pragma once
#include <memory>
#include <optional>

#include <torchspan/autograd/context.h>
#include <torchspan/detail/rpc/extension.h>

namespace torchspan::autograd {

/// How many contexts and running passes a worker has.
struct PassCounts {
  std::size_t contexts = 0;
  std::size_t passes = 0;
  std::size_t remembered = 0;  ///< ids of ended contexts, kept so that late messages do not revive them
};

/// Distributed autograd of one worker: an extension to give to its Session (which has it by default).
class AutogradExtension final : public rpc::Extension {
 public:
  AutogradExtension();
  ~AutogradExtension() override;
  void attach(rpc::Registrar& registrar) override;

  /// A context by its id; throws Error{kInvalid} when this worker knows no such context: it took no part in
  /// it, or it was released.
  ContextView find(std::uint64_t context) const;
  /// The same; nothing instead of the throw.
  std::optional<ContextView> try_find(std::uint64_t context) const;
  /// The same for a context that `peer` works in, of which this worker may not have heard yet: takes part in
  /// it, as by a call that `peer` makes in it. For messages of other rooms that come ahead of such calls,
  /// sent after ContextView::add_worker(). Throws Error{kInvalid} when the context has ended.
  ContextView join(std::uint64_t context, std::uint32_t peer);
  PassCounts counts() const;

  class Impl;
  const std::shared_ptr<Impl>& impl() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace torchspan::autograd
