#include "python/errors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <torchspan/core/error.h>

namespace torchspan::python {
namespace {

/// torch turns it into the Python exception that python_type() returns, with the text of what().
class ErrorOfKind final : public torch::PyTorchError {
 public:
  explicit ErrorOfKind(const Error& error)
      : PyTorchError(std::string("torchspan: ") + error.what()), kind_(error.kind()) {}

  /// Borrowed from its module. Called with the GIL.
  PyObject* python_type() override {
    try {
      const pybind11::object found =
          pybind11::module_::import("torchspan.errors").attr("class_of")(std::string(to_string(kind_)));
      return found.ptr();
    } catch (const pybind11::error_already_set&) {  // at the end of the interpreter
      return PyExc_RuntimeError;
    }
  }

 private:
  const ErrorKind kind_;
};

}  // namespace

std::exception_ptr to_torch_error(const std::exception_ptr& error, bool calling) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    if (calling && ours.kind() == ErrorKind::kInvalid) {
      const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
      return std::make_exception_ptr(c10::ValueError(here, std::string("torchspan: ") + ours.what()));
    }
    return std::make_exception_ptr(ErrorOfKind(ours));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace torchspan::python
