
#include <torchspan/core/bytes.h>
#include <torchspan/detail/rpc/error_types.h>

#include "core/api/throw_invalid.h"

namespace torchspan::rpc {

void ErrorTypes::insert(ErrorType type) {
  if (type.name.empty()) throw_invalid("an error type has an empty name; give it one");
  for (const ErrorType& known : types_) {
    if (known.name == type.name)
      throw_invalid("two error types are named '{}'; every name may be used once", type.name);
  }
  types_.push_back(std::move(type));
}

std::optional<Bytes> ErrorTypes::encode(const std::exception_ptr& cause) const {
  for (const ErrorType& type : types_) {
    std::optional<Bytes> value;
    try {
      value = type.encode(cause);
    } catch (...) {
      throw_invalid("an error of type '{}' could not be encoded: {}", type.name,
                    describe(std::current_exception()).text);
    }
    if (!value) continue;
    wire::Payload payload = wire::to_payload(type.name);
    payload.value.insert(payload.value.end(), value->begin(), value->end());
    return std::move(payload.value);
  }
  return std::nullopt;
}

std::exception_ptr ErrorTypes::rebuild(BytesView encoded, const std::exception_ptr& remote_error) const {
  try {
    for (const ErrorType& type : types_) {
      const Bytes prefix = wire::to_payload(type.name).value;
      if (encoded.size() < prefix.size() || !std::equal(prefix.begin(), prefix.end(), encoded.begin()))
        continue;
      return type.rebuild(Bytes(encoded.begin() + static_cast<std::ptrdiff_t>(prefix.size()), encoded.end()),
                          remote_error);
    }
  } catch (const Error&) {
  }
  return remote_error;
}

}  // namespace torchspan::rpc
