#include "python/errors.h"

#include <c10/util/Exception.h>

#include <torchspan/core/error.h>

namespace torchspan::python {

std::exception_ptr to_torch_error(const std::exception_ptr& error, bool calling) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    const c10::SourceLocation here{__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)};
    const std::string text = std::string("torchspan: ") + ours.what();
    if (calling && ours.kind() == ErrorKind::kInvalid)
      return std::make_exception_ptr(c10::ValueError(here, text));
    return std::make_exception_ptr(c10::DistBackendError(here, text));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace torchspan::python
