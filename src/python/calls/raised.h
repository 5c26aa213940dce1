#pragma once
#include <Python.h>
#include <exception>
#include <fmt/format.h>
#include <memory>
#include <pybind11/pybind11.h>
#include <utility>

#include <torchspan/core/error.h>

#include "python/calls/python_functions.h"
#include "python/calls/python_worker.h"

namespace torchspan::python {

/// Throws what a signal handler raises, such as KeyboardInterrupt. With the GIL; on another thread than the main one it does
/// nothing.
inline void check_signals() {
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

/// What Python raised inside of a call of the library, such as a layer of a pipeline or a signal handler, for the caller of the
/// library on the same thread.
class Raised {
 public:
  explicit Raised(std::shared_ptr<Packer> packer) : packer_(std::move(packer)) {}

  /// Runs `body` with the GIL. Keeps what it raises, and throws its text, for the other workers.
  template <class F>
  auto guard(F&& body) {
    const pybind11::gil_scoped_acquire gil;
    try {
      return body();
    } catch (const pybind11::error_already_set& error) {
      keep(exception_of(error));
    } catch (const pybind11::builtin_exception& error) {  // of checks of this room
      error.set_error();
      keep(exception_of(pybind11::error_already_set()));
    }
  }
  /// Runs `body` without the GIL; an Error becomes the exception that caused it on this worker, or one of torchspan.errors.
  template <class F>
  auto released(F&& body) {
    kept_ = {};
    try {
      const pybind11::gil_scoped_release gil;
      return body();
    } catch (const std::exception& error) {
      // LibTorch's engine leaves what the backward of a function of Python raised in the state of the thread.
      if (PyErr_Occurred() != nullptr) kept_ = Object(exception_of(pybind11::error_already_set()));
      if (kept_) throw_kept(dynamic_cast<const Error*>(&error));
      raise(*packer_, std::current_exception());
    }
  }

 private:
  [[noreturn]] void keep(const pybind11::object& exception) {
    kept_ = Object(exception);
    throw PythonFunctions::describe(*packer_, exception);
  }
  /// With the place in the pipeline, if there is one, as a note, which Python 3.11 and later print.
  [[noreturn]] void throw_kept(const Error* place) {
    const pybind11::object exception = std::exchange(kept_, {}).get();
    if (place != nullptr && pybind11::hasattr(exception, "add_note"))
      exception.attr("add_note")(fmt::format("torchspan: {}", place->message()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw pybind11::error_already_set();
  }

  const std::shared_ptr<Packer> packer_;
  Object kept_;
};

}  // namespace torchspan::python
