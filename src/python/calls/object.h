#pragma once
#include <Python.h>
#include <memory>
#include <pybind11/pybind11.h>

namespace torchspan::python {

/// A Python object that threads without the GIL may copy and drop. Empty by default.
class Object {
 public:
  Object() = default;
  /// Needs the GIL.
  explicit Object(pybind11::object object);

  explicit operator bool() const { return held_ != nullptr; }
  /// A new reference. Needs the GIL.
  pybind11::object get() const { return pybind11::reinterpret_borrow<pybind11::object>(held_.get()); }

 private:
  std::shared_ptr<PyObject> held_;
};

}  // namespace torchspan::python
