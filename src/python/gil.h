#pragma once
#include <Python.h>
#include <utility>

namespace torchspan::python {

/// Runs `body` without the GIL if this thread holds it: for what waits for threads that may need it.
template <class F>
void without_gil(F&& body) {
  PyThreadState* const held =
      Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
  std::forward<F>(body)();
  if (held != nullptr) PyEval_RestoreThread(held);
}

}  // namespace torchspan::python
