#pragma once
#include <Python.h>
#include <utility>

#include <torchspan/detail/core/owner_process.h>

namespace torchspan::python {

/// Runs `body` without the GIL if this thread holds it: for what waits for threads that may need it. Takes it again, also if
/// `body` throws.
template <class F>
void without_gil(F&& body) {
  struct Released {
    Released() : held(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
    ~Released() {
      if (held != nullptr) PyEval_RestoreThread(held);
    }
    Released(const Released&) = delete;
    PyThreadState* const held;
  };
  const Released released;
  std::forward<F>(body)();
}

/// Deletes without the GIL what has threads that may need it; not in a forked child, and not after the interpreter has ended,
/// when its threads may wait for the GIL for ever.
class EndsWithInterpreter {
 public:
  template <class T>
  void operator()(T* object) const {
    if (!process_.is_current() || Py_IsInitialized() == 0) return keep_until_exit(object);
    without_gil([object] { delete object; });
  }

 private:
  OwnerProcess process_;
};

/// Keeps Python's state of this thread while it lives, without the GIL. Without it, each function that takes the GIL makes
/// a state, maps memory for it, and unmaps that, which interrupts all threads of the process.
class KeptThreadState {
 public:
  KeptThreadState() {
    if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() != nullptr) return;
    gil_ = PyGILState_Ensure();
    state_ = PyEval_SaveThread();
  }
  ~KeptThreadState() {
    if (state_ == nullptr || !process_.is_current() || Py_IsInitialized() == 0) return;
    PyEval_RestoreThread(state_);
    PyGILState_Release(gil_);
  }
  KeptThreadState(const KeptThreadState&) = delete;

 private:
  const OwnerProcess process_;
  PyGILState_STATE gil_{};
  PyThreadState* state_ = nullptr;  ///< null: this thread has one already
};

}  // namespace torchspan::python
