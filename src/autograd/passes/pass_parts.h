#pragma once
#include <cstdint>

#include "autograd/contexts/context_state.h"
#include "autograd/messages/outbox.h"
#include "autograd/messages/weak_worker.h"
#include "autograd/passes/pass_graph.h"
#include "autograd/passes/pass_key.h"
#include "autograd/passes/pass_owner.h"
#include "autograd/smart/smart_marks.h"

namespace torchspan::autograd {

/// The objects of a pass that its PassEnding and its MarkExchange use; PassState owns them all.
struct PassParts {
  PassOwner& owner;
  const WeakWorker& worker;
  std::uint32_t rank;  ///< of this worker
  ContextState& context;
  const PassKey& key;
  Outbox& outbox;
  PassGraph& graph;
  SmartMarks& marks;
};

}  // namespace torchspan::autograd
