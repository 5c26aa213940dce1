#pragma once
#include <cstdint>

#include "autograd/context_state.h"
#include "autograd/outbox.h"
#include "autograd/pass_graph.h"
#include "autograd/pass_key.h"
#include "autograd/pass_owner.h"
#include "autograd/smart_marks.h"
#include "autograd/weak_worker.h"

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
