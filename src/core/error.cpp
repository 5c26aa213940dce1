#include <algorithm>
#include <cstdlib>
#include <cxxabi.h>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <typeinfo>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/source_location.h>

namespace torchspan {

std::string_view file_of(std::string_view path) {
  path.remove_prefix(std::min(path.size(), path.rfind('/') + 1));
  return path;
}

std::string site_text(const SourceLocation& site) {
  if (site.line() == 0) return {};
  return std::string(file_of(site.file_name())) + ":" + std::to_string(site.line());
}

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

std::string shortened(std::string text, std::size_t most) {
  if (text.size() <= most) return text;
  const std::size_t size = text.size();
  std::size_t end = most;
  const auto continues = [&](std::size_t at) {
    return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80;
  };
  while (end != 0 && most - end < 3 && continues(end)) --end;
  if (continues(end)) end = most;  // not UTF-8
  text.resize(end);
  return text + fmt::format("… ({} more bytes)", size - end);
}

Error::Error(ErrorKind kind, std::string message) : kind_(kind), message_(shortened(std::move(message))) {
  compose();
}

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
  frame.text = shortened(std::move(frame.text));
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

constexpr int kMostCauses = 16;

std::string what_of(const char* what) { return what == nullptr ? "an exception whose what() is null" : what; }

/// The type without the wrapper of std::throw_with_nested().
std::string dynamic_type_of(const std::type_info& type) {
  constexpr std::string_view kNested = "std::_Nested_exception<";
  std::string name = demangle(type.name());
  if (!name.starts_with(kNested) || !name.ends_with('>')) return name;
  return name.substr(kNested.size(), name.size() - kNested.size() - 1);
}

/// Without the exceptions nested in it.
ExceptionDescription describe_alone(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& e) {
    const std::string type = dynamic_type_of(typeid(e));
    return {type, without_stack(type, what_of(e.what()))};
  } catch (const std::string& text) {
    return {"std::string", text};
  } catch (const char* text) {
    return {"const char*", text == nullptr ? "a null pointer" : text};
  } catch (...) {
    const std::type_info* type = abi::__cxa_current_exception_type();
    return {type == nullptr ? "unknown type" : dynamic_type_of(*type),
            "an exception that is not a std::exception"};
  }
}

/// Null if there is none.
std::exception_ptr nested_in(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const std::nested_exception& outer) {
    return outer.nested_ptr();
  } catch (...) {
    return nullptr;
  }
}

/// Null if it is another exception.
std::optional<Error> error_in(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    return error;
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace

ExceptionDescription describe(const std::exception_ptr& exception) {
  if (exception == nullptr) return {"no exception", "nothing was thrown"};
  ExceptionDescription whole = describe_alone(exception);
  std::exception_ptr cause = nested_in(exception);
  for (int depth = 0; cause != nullptr && depth < kMostCauses; cause = nested_in(cause), ++depth) {
    const std::optional<Error> error = error_in(cause);
    if (error && !error->frames().empty()) break;
    const ExceptionDescription inner = describe_alone(cause);
    whole.text += fmt::format(", caused by {}: {}", inner.type, inner.text);
  }
  return whole;
}

void throw_invalid(std::string message) { throw Error(ErrorKind::kInvalid, std::move(message)); }

Error to_error(const std::exception_ptr& exception) {
  if (exception == nullptr) return Error(ErrorKind::kInvalid, "nothing was thrown");
  if (const auto error = error_in(exception)) return *error;
  std::string around;
  std::exception_ptr cause = exception;
  for (int depth = 0; cause != nullptr && depth < kMostCauses; cause = nested_in(cause), ++depth) {
    const std::optional<Error> error = error_in(cause);
    if (!error) {
      const ExceptionDescription outer = describe_alone(cause);
      around += fmt::format("{}: {}, caused by ", outer.type, outer.text);
      continue;
    }
    if (!error->frames().empty()) return *error;
    Error whole(error->kind(), around + error->message());
    return whole.with_worker(error->worker()).with_call(error->call()).with_elapsed(error->elapsed());
  }
  const ExceptionDescription description = describe(exception);
  return Error(ErrorKind::kInvalid, fmt::format("{}: {}", description.type, description.text));
}

}  // namespace torchspan
