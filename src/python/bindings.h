#pragma once
#include <pybind11/pybind11.h>

// What Python sees of each part, as module_main.cpp puts it together.
namespace torchspan::python {

/// Defines Worker, RRef, Context and join_worker() of torchspan._C.
void bind_calls(pybind11::module_& module);
/// Adds `RpcOptions`, `RpcAgent` and `join_rpc` to the module.
void bind_rpc(pybind11::module_& module);
/// Adds TorchSpan's own optimizers and the norm of gradients to the module.
void bind_optimizers(pybind11::module_& module);
/// Adds checkpoints to the module.
void bind_checkpoints(pybind11::module_& module);
/// Defines Pipeline and the seeds of torchspan._C, for torchspan/pipeline.py.
void bind_pipeline(pybind11::module_& module);

}  // namespace torchspan::python
