#pragma once
#include <memory>
#include <pybind11/pybind11.h>
#include <string>
#include <vector>

#include <torchspan/rpc/worker.h>

namespace torchspan::python {

struct Codec;

/// A type by its name on the wire: "int64", or "vector" with its parts.
struct WireType {
  std::string name;
  std::vector<WireType> parts = {};
  const Codec* codec = nullptr;  ///< null: of several parts, or of a class
};

/// A function of the table of C++ workers, by its name and types, which are part of its identity:
/// "(Tensor, vector<int64>) -> float64"; "new (int64) -> Carts", a constructor; or "Carts::(Tensor) -> Tensor", a member function,
/// whose first argument is a reference to the object. Immutable. What needs the GIL says so.
class TypedFunction {
 public:
  /// Throws Error{kInvalid} for a text that is no signature, and for types that Python values cannot have.
  /// "bytes" in the text is a string of C++ that Python has as bytes.
  TypedFunction(std::string name, const std::string& signature);

  const std::string& name() const { return name_; }
  /// As workers of C++ have it.
  const std::string& signature() const { return signature_; }
  /// Whether the result is a value of Python, and not an object that stays on its worker.
  bool has_value() const;
  std::uint64_t id() const { return id_; }

  /// Writes the arguments. Throws Error{kInvalid} that names the one that has another type. With the GIL.
  void encode_arguments(wire::Encoder& encoder, const pybind11::tuple& arguments) const;
  /// Any bytes give arguments, or throw Error{kInvalid}. With the GIL. So do the next two.
  pybind11::tuple decode_arguments(wire::Decoder& decoder) const;
  void encode_result(wire::Encoder& encoder, const pybind11::object& result) const;
  pybind11::object decode_result(wire::Payload& payload) const;
  /// The type of the result, for references.
  const std::string& result_text() const { return result_text_; }

 private:
  const std::string name_;
  std::string signature_;
  std::uint64_t id_ = 0;
  std::vector<WireType> arguments_;
  WireType result_;
  std::string result_text_;
};

/// Serves `function`, a callable of Python, to workers of C++.
rpc::FunctionEntry serve_typed(const std::shared_ptr<const TypedFunction>& type, pybind11::object function);

}  // namespace torchspan::python
