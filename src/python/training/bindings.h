#pragma once
#include <pybind11/pybind11.h>

namespace torchspan::python {

/// Adds TorchSpan's own optimizers and the norm of gradients to the module.
void bind_optimizers(pybind11::module_& module);
/// Adds checkpoints to the module.
void bind_checkpoints(pybind11::module_& module);

}  // namespace torchspan::python
