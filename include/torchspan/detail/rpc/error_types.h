#pragma once
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <torchspan/wire.h>

namespace torchspan::rpc {

/// A user exception type that a handler can throw to its caller across workers.
struct ErrorType {
  std::string name;
  /// Encodes the exception; nullopt if it has another type.
  std::optional<Bytes> (*encode)(const std::exception_ptr& cause) = nullptr;
  /// Rebuilds the exception with `remote_error`, an Error, nested in it.
  std::exception_ptr (*rebuild)(Bytes value, const std::exception_ptr& remote_error) = nullptr;
};

template <class E>
std::optional<Bytes> encode_error(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const E& error) {
    wire::Payload payload = wire::to_payload(error);
    if (payload.tensors.empty() && payload.references.empty()) return std::move(payload.value);
  } catch (...) {
  }
  return std::nullopt;
}

template <class E>
std::exception_ptr rebuild_error(Bytes value, const std::exception_ptr& remote_error) {
  try {
    wire::Payload payload;
    payload.value = std::move(value);
    E error = wire::from_payload<E>(payload);
    try {
      std::rethrow_exception(remote_error);
    } catch (...) {
      std::throw_with_nested(std::move(error));
    }
  } catch (const E&) {
    return std::current_exception();
  } catch (...) {
    return remote_error;  // not an E here: keep the Error
  }
}

/// The exception types that are sent to the caller. The first type that matches is used.
class ErrorTypes {
 public:
  template <class E>
  void add(std::string name) {
    static_assert(wire::Transferable<E>,
                  "an exception type that is sent to the caller needs a torchspan::Wire specialization");
    static_assert(std::is_class_v<E> && !std::is_final_v<E>,
                  "it is thrown with the remote Error nested in it");
    insert({std::move(name), &encode_error<E>, &rebuild_error<E>});
  }
  /// Encodes the type name and the value; nullopt if no type matches. Throws Error that names the type if its Wire does.
  std::optional<Bytes> encode(const std::exception_ptr& cause) const;
  /// Rebuilds what encode() returned; returns `remote_error` itself for a type unknown here.
  std::exception_ptr rebuild(BytesView encoded, const std::exception_ptr& remote_error) const;

 private:
  void insert(ErrorType type);
  std::vector<ErrorType> types_;
};

/// Name of the blob in an error reply that holds ErrorTypes::encode().
inline constexpr const char* kErrorBlob = "rpc.error";
/// Name of the blob in an error reply that holds the kind (one byte) with which the function refused the call. A release
/// that does not know it reports kRemoteFailure.
inline constexpr const char* kRefusalBlob = "rpc.refusal";

/// A user function's failure together with what else the caller gets.
class UserFailure final : public Error {
 public:
  UserFailure(Error error, std::optional<Bytes> encoded, std::optional<ErrorKind> refusal)
      : Error(std::move(error)), encoded_(std::move(encoded)), refusal_(refusal) {}
  /// Its exception, if its type is registered.
  const std::optional<Bytes>& encoded() const { return encoded_; }
  const std::optional<ErrorKind>& refusal() const { return refusal_; }

 private:
  std::optional<Bytes> encoded_;
  std::optional<ErrorKind> refusal_;
};

}  // namespace torchspan::rpc
