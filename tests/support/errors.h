#pragma once
#include <stdexcept>
#include <string>

#include <torchspan/core/error.h>

namespace torchspan::testing {

/// Returns the Error that `body` throws. Throws std::logic_error if it throws none, which fails the test,
/// also if `body` runs in a separate process or thread.
template <class F>
Error error_of(F&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("nothing was thrown");
}

template <class F>
ErrorKind kind_of(F&& body) {
  return error_of(body).kind();
}

template <class F>
std::string error_text(F&& body) {
  return error_of(body).what();
}

/// The text of the Error of kind kInvalid that `body` throws.
template <class F>
std::string invalid_text(F&& body) {
  const Error error = error_of(body);
  if (error.kind() != ErrorKind::kInvalid)
    throw std::logic_error(std::string("not kInvalid: ") + error.what());
  return error.what();
}

}  // namespace torchspan::testing
