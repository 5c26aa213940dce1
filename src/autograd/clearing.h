#pragma once
#include <memory>

#include <torchspan/detail/rpc/extension.h>

#include "autograd/registry.h"

namespace torchspan::autograd {

/// Serves those who ask this worker to forget the gradients of a context.
void serve_clearing(rpc::Registrar& registrar, const std::shared_ptr<Registry>& registry);

}  // namespace torchspan::autograd
