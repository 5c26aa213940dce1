#pragma once
#include <pybind11/pybind11.h>

namespace torchspan::python {

/// Defines Pipeline and the seeds of torchspan._C, for torchspan/pipeline.py.
void bind_pipeline(pybind11::module_& module);

}  // namespace torchspan::python
