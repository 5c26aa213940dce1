#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>

#include "autograd/contexts/registry.h"

namespace torchspan::autograd {

/// Serves requests to clear this worker's gradients of a context.
void serve_clear_gradients(rpc::Registrar& registrar, const std::shared_ptr<Registry>& registry);

}  // namespace torchspan::autograd
