#pragma once
#include <exception>
#include <stdexcept>
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::python {

/// The exception that torch turns into Python's: ValueError for wrong arguments of a call (kInvalid, `calling`), else
/// the class of torchspan.errors for its kind, a torch.distributed.DistBackendError. Exceptions that are no Error stay as they are.
std::exception_ptr to_torch_error(const std::exception_ptr& error, bool calling);

/// Runs `body`; an Error that it throws becomes what to_torch_error() makes of it.
template <class F>
auto with_torch_errors(F&& body, bool calling = true) {
  try {
    return body();
  } catch (...) {
    std::rethrow_exception(to_torch_error(std::current_exception(), calling));
  }
}

/// Runs `body`; an Error that it throws becomes a std::runtime_error with its text, as torch.distributed.rpc throws.
template <class F>
auto with_rpc_errors(F&& body) {
  try {
    return body();
  } catch (const Error& error) {
    throw std::runtime_error(std::string("torchspan: ") + error.what());
  }
}

}  // namespace torchspan::python
