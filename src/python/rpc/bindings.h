#pragma once
#include <torch/csrc/utils/pybind.h>

namespace torchspan::python {

/// Adds `RpcOptions`, `RpcAgent` and `join_rpc` to the module.
void bind_rpc(pybind11::module_& module);

}  // namespace torchspan::python
