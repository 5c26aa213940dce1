#include <cstdlib>
#include <cxxabi.h>
#include <fmt/format.h>
#include <memory>
#include <typeinfo>

#include <torchspan/core/error.h>

namespace torchspan {

std::string_view to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalid:
      return "invalid";
    case ErrorKind::kRemoteFailure:
      return "remote failure";
    case ErrorKind::kDisconnected:
      return "disconnected";
    case ErrorKind::kTimedOut:
      return "timed out";
    case ErrorKind::kCancelled:
      return "cancelled";
    case ErrorKind::kOverloaded:
      return "overloaded";
    case ErrorKind::kDenied:
      return "denied";
    case ErrorKind::kUnsupported:
      return "unsupported";
  }
  return "unknown kind";
}

Error::Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) { compose(); }

Error& Error::with_worker(std::string worker) {
  worker_ = std::move(worker);
  compose();
  return *this;
}

Error& Error::with_call(std::string call) {
  call_ = std::move(call);
  compose();
  return *this;
}

Error& Error::with_elapsed(Duration elapsed) {
  elapsed_ = elapsed;
  compose();
  return *this;
}

Error& Error::with_frame(RemoteFrame frame) {
  frames_.push_back(std::move(frame));
  compose();
  return *this;
}

void Error::compose() {
  text_ = fmt::format("{}: {}", to_string(kind_), message_);
  std::string about;
  if (!call_.empty()) about += fmt::format("call '{}'", call_);
  if (!worker_.empty()) about += fmt::format("{}worker '{}'", about.empty() ? "" : ", ", worker_);
  if (elapsed_ > Duration::zero()) {
    about += fmt::format("{}after {:.3f} s", about.empty() ? "" : ", ", to_seconds(elapsed_));
  }
  if (!about.empty()) text_ += fmt::format(" ({})", about);
  headline_ = text_.size();
  for (const RemoteFrame& frame : frames_) {
    text_ +=
        fmt::format("\n  in '{}' on worker '{}': {}: {}", frame.call, frame.worker, frame.type, frame.text);
  }
}

namespace {

std::string demangle(const char* mangled) {
  int status = 0;
  std::unique_ptr<char, void (*)(void*)> name(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                              std::free);
  return status == 0 ? name.get() : mangled;
}

/// The text of LibTorch's own errors ends with the stack of the throwing thread, which is useless on another
/// worker.
std::string without_stack(const std::string& type, std::string text) {
  if (!type.starts_with("c10::")) return text;
  return text.substr(0, text.find("\nException raised from "));
}

}  // namespace

ExceptionDescription describe(const std::exception_ptr& exception) {
  if (exception == nullptr) return {"no exception", "nothing was thrown"};
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& e) {
    const std::string type = demangle(typeid(e).name());
    return {type, without_stack(type, e.what())};
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    return {type == nullptr ? "unknown type" : demangle(type->name()),
            "an exception that is not a std::exception"};
  }
}

void throw_invalid(std::string message) { throw Error(ErrorKind::kInvalid, std::move(message)); }

Error to_error(const std::exception_ptr& exception) {
  if (exception == nullptr) return Error(ErrorKind::kInvalid, "nothing was thrown");
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (const std::nested_exception& rebuilt) {
    if (rebuilt.nested_ptr()) return to_error(rebuilt.nested_ptr());
    return Error(ErrorKind::kInvalid, describe(exception).text);
  } catch (...) {
    ExceptionDescription description = describe(exception);
    return Error(ErrorKind::kInvalid, fmt::format("{}: {}", description.type, description.text));
  }
}

}  // namespace torchspan
