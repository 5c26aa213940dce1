#include "python/calls/object.h"

namespace torchspan::python {
namespace {

/// After the interpreter has ended, its objects are gone.
void drop(PyObject* object) {
  if (Py_IsInitialized() == 0) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF(object);
  PyGILState_Release(gil);
}

}  // namespace

Object::Object(pybind11::object object) : held_(object.release().ptr(), drop) {}

}  // namespace torchspan::python
