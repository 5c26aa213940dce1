#pragma once
#include <pybind11/pybind11.h>

namespace torchspan::python {

/// Defines Worker, RRef, Context and join_worker() of torchspan._C.
void bind_calls(pybind11::module_& module);

}  // namespace torchspan::python
