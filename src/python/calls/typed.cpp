#include "python/calls/typed.h"

#include <fmt/format.h>
#include <functional>
#include <map>
#include <pybind11/stl.h>
#include <string_view>
#include <utility>

#include <torch/csrc/autograd/python_variable.h>

#include "core/api/throw_invalid.h"
#include "python/calls/python_functions.h"

namespace torchspan::python {

namespace py = pybind11;

struct Codec {
  void (*encode)(wire::Encoder&, py::handle);
  py::object (*decode)(wire::Decoder&);
};

namespace {

/// Deeper types are refused.
constexpr int kTypeDepth = 16;

constexpr const char* kTypes =
    "bool, int8 to int64, uint8 to uint64, float32, float64, string, bytes (a string in C++, too), Tensor, "
    "RRef<any type>, as a result void, and "
    "vector<T>, optional<T>, pair<A, B>, tuple<…>, map<K, V> of them; K not a Tensor or container";

template <class T>
Codec number() {
  return {[](wire::Encoder& encoder, py::handle value) {
            // pybind11 takes None and any truth value for a bool, and a bool for a number.
            if (PyBool_Check(value.ptr()) != static_cast<int>(std::is_same_v<T, bool>))
              throw py::cast_error();
            wire::encode<T>(encoder, value.cast<T>());
          },
          [](wire::Decoder& decoder) -> py::object { return py::cast(wire::decode<T>(decoder)); }};
}

/// A string of C++ that is bytes in Python, whatever it holds.
constexpr std::string_view kBytesType = "bytes";

const Codec* find_codec(const std::string& name) {
  static const std::map<std::string, Codec> kCodecs{
      {"bool", number<bool>()},
      {"int8", number<std::int8_t>()},
      {"int16", number<std::int16_t>()},
      {"int32", number<std::int32_t>()},
      {"int64", number<std::int64_t>()},
      {"uint8", number<std::uint8_t>()},
      {"uint16", number<std::uint16_t>()},
      {"uint32", number<std::uint32_t>()},
      {"uint64", number<std::uint64_t>()},
      {"float32", number<float>()},
      {"float64", number<double>()},
      {"void",
       {[](wire::Encoder&, py::handle value) {
          if (!value.is_none()) throw py::cast_error();
        },
        [](wire::Decoder&) -> py::object { return py::none(); }}},
      {"string",
       {[](wire::Encoder& encoder, py::handle value) {
          if (!PyUnicode_Check(value.ptr())) throw py::cast_error();
          wire::encode(encoder, value.cast<std::string>());
        },
        [](wire::Decoder& decoder) -> py::object {
          const std::string text = wire::decode<std::string>(decoder);
          PyObject* const str =
              PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
          if (str != nullptr) return py::reinterpret_steal<py::object>(str);
          PyErr_Clear();
          throw_invalid("a string is not UTF-8: declare it as bytes in the function of Python");
        }}},
      {std::string(kBytesType),
       {[](wire::Encoder& encoder, py::handle value) {
          if (!PyBytes_Check(value.ptr())) throw py::cast_error();
          wire::encode(encoder, value.cast<std::string>());
        },
        [](wire::Decoder& decoder) -> py::object { return py::bytes(wire::decode<std::string>(decoder)); }}},
      {"Tensor",
       {[](wire::Encoder& encoder, py::handle value) {
          if (THPVariable_Check(value.ptr()) == 0) throw py::cast_error();
          wire::encode(encoder, THPVariable_Unpack(value.ptr()));
        },
        [](wire::Decoder& decoder) -> py::object {
          return py::reinterpret_steal<py::object>(THPVariable_Wrap(wire::decode<at::Tensor>(decoder)));
        }}},
  };
  const auto found = kCodecs.find(name);
  return found == kCodecs.end() ? nullptr : &found->second;
}

bool takes(const std::string& head, const std::vector<WireType>& parts) {
  if (head == "vector" || head == "optional") return parts.size() == 1;
  if (head == "pair") return parts.size() == 2;
  if (head == "map" || head == "unordered_map")
    return parts.size() == 2 && parts[0].codec != nullptr && parts[0].name != "Tensor";
  return head == "tuple";
}

/// Of objects, which stay on their worker.
constexpr const char* kReference = "RRef";

/// Reads "(A, B<C>) -> D", "new (A) -> D" and "D::(A) -> B".
class SignatureReader {
 public:
  explicit SignatureReader(std::string_view text) : text_(text), left_(text) {}

  std::vector<WireType> arguments() {
    std::vector<WireType> all;
    const std::size_t begin = std::min(left_.find('('), left_.size());
    if (begin > 2 && left_.substr(begin - 2, 2) == "::") {
      all.push_back({kReference, {{std::string(left_.substr(0, begin - 2))}}});
      left_.remove_prefix(begin);
    } else {
      skip("new ");
    }
    expect("(");
    if (skip(")")) return all;
    do all.push_back(type(1));
    while (skip(", "));
    expect(")");
    return all;
  }
  WireType result() {
    expect(" -> ");
    WireType type = this->type(0);
    if (!left_.empty()) fail();
    return type;
  }
  /// The signature as workers of C++ have it; after the end was read.
  std::string of_cpp() const {
    std::string text(text_);
    for (auto at = bytes_at_.rbegin(); at != bytes_at_.rend(); ++at)
      text.replace(*at, kBytesType.size(), "string");
    return text;
  }

 private:
  bool skip(std::string_view token) {
    if (!left_.starts_with(token)) return false;
    left_.remove_prefix(token.size());
    return true;
  }
  void expect(std::string_view token) {
    if (!skip(token)) fail();
  }
  /// `depth` 0: of a result, which alone may be void, or of a class.
  WireType type(int depth) {
    if (depth == kTypeDepth) fail();
    const std::size_t end = std::min(left_.find_first_of("<>,() "), left_.size());
    WireType type{std::string(left_.substr(0, end))};
    left_.remove_prefix(end);
    if (type.name == kReference && skip("<")) {
      const std::size_t close = std::min(left_.find('>'), left_.size());
      type.parts.push_back({std::string(left_.substr(0, close))});
      left_.remove_prefix(close);
      expect(">");
    } else if (skip("<")) {
      do type.parts.push_back(this->type(depth + 1));
      while (skip(", "));
      expect(">");
      if (!takes(type.name, type.parts)) fail_type(type.name);
    } else {
      type.codec = find_codec(type.name);
      if (type.name == kBytesType) bytes_at_.push_back(text_.size() - left_.size() - kBytesType.size());
      if (depth != 0 && (type.codec == nullptr || type.name == "void")) fail_type(type.name);
      if (type.name.empty()) fail();
    }
    return type;
  }
  [[noreturn]] void fail() const {
    throw_invalid("'{}' is not a signature at '{}': expected the form '(Tensor, vector<int64>) -> float64'",
                  text_, left_);
  }
  [[noreturn]] void fail_type(const std::string& name) const {
    throw_invalid("the type '{}' in '{}' cannot be a value of Python: the types are {}", name, text_, kTypes);
  }

  const std::string_view text_;
  std::string_view left_;
  std::vector<std::size_t> bytes_at_;  ///< where kBytesType stands
};

void encode(wire::Encoder& encoder, const WireType& type, py::handle value) {
  if (type.codec != nullptr) return type.codec->encode(encoder, value);
  const wire::NestingScope nesting(encoder);
  if (type.name == kReference) {
    const auto& reference = value.cast<const RRef<Object>&>();
    if (reference.state()->type_tag() != wire::digest(type.parts[0].name)) throw py::cast_error();
    encoder.reference(reference.state());
  } else if (type.name == "optional") {
    encoder.bytes().put(!value.is_none());
    if (!value.is_none()) encode(encoder, type.parts[0], value);
  } else if (type.name == "map" || type.name == "unordered_map") {
    const auto dict = value.cast<py::dict>();
    wire::encode_count(encoder, dict.size());
    for (const auto& [key, its_value] : dict) {
      encode(encoder, type.parts[0], key);
      encode(encoder, type.parts[1], its_value);
    }
  } else {
    if (!py::isinstance<py::tuple>(value) && !py::isinstance<py::list>(value)) throw py::cast_error();
    const auto all = value.cast<py::sequence>();
    const bool vector = type.name == "vector";
    if (vector) wire::encode_count(encoder, all.size());
    if (!vector && all.size() != type.parts.size()) throw py::cast_error();
    for (std::size_t i = 0; i < all.size(); ++i)
      encode(encoder, type.parts[vector ? 0 : i], py::object(all[i]));
  }
}

py::object decode(wire::Decoder& decoder, const WireType& type) {
  if (type.codec != nullptr) return type.codec->decode(decoder);
  const wire::NestingScope nesting(decoder);
  if (type.name == kReference) {
    auto reference = std::static_pointer_cast<rpc::Reference>(decoder.reference());
    if (!reference) return py::none();
    rpc::check_reference_type(*reference, type.parts[0].name);
    return py::cast(RRef<Object>(std::move(reference)));
  }
  if (type.name == "optional")
    return wire::decode_flag(decoder) ? decode(decoder, type.parts[0]) : py::object(py::none());
  if (type.name == "map" || type.name == "unordered_map") {
    py::dict dict;
    for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left) {
      const py::object key = decode(decoder, type.parts[0]);
      if (dict.contains(key)) throw_invalid("a map has a key twice");
      dict[key] = decode(decoder, type.parts[1]);
    }
    return std::move(dict);
  }
  py::list all;
  if (type.name == "vector") {
    for (std::size_t left = decoder.bytes().get_count(1); left > 0; --left)
      all.append(decode(decoder, type.parts[0]));
    return std::move(all);
  }
  for (const WireType& part : type.parts) all.append(decode(decoder, part));
  return py::tuple(all);
}

std::string type_text(const WireType& type) {
  std::string text = type.name;
  if (type.parts.empty()) return text;
  text += '<';
  for (std::size_t i = 0; i < type.parts.size(); ++i) text += (i == 0 ? "" : ", ") + type_text(type.parts[i]);
  return text + '>';
}

/// Writes `value`, which messages call `what`.
void encode_checked(wire::Encoder& encoder, const WireType& type, py::handle value, const std::string& what) {
  try {
    encode(encoder, type, value);
  } catch (const py::error_already_set& error) {  // must not leave this thread
    throw_invalid("{}: {}", what, error.what());
  } catch (const py::cast_error&) {
    throw_invalid("{} is a {}, or has parts, that cannot be a {}", what,
                  py::type::of(value).attr("__name__").cast<std::string>(), type_text(type));
  }
}

/// The result of a function of Python on its way to a worker of C++.
class TypedValue final : public rpc::Value {
 public:
  TypedValue(std::shared_ptr<const TypedFunction> type, const py::object& value)
      : type_(std::move(type)), value_(value) {}

  void encode(wire::Encoder& encoder) const override {
    keep_thread_state();
    const py::gil_scoped_acquire gil;
    type_->encode_result(encoder, value_.get());
  }
  const std::type_info& type() const override { return typeid(TypedValue); }
  void* address() override { return this; }
  std::string type_name() const override { return type_->result_text(); }
  rpc::KnownSize size() const override { return {}; }

 protected:
  const std::type_info& object_type() const override { return typeid(TypedValue); }
  void* object_address() override { return this; }
  void throw_object() override { throw this; }

 private:
  const std::shared_ptr<const TypedFunction> type_;
  const Object value_;
};

}  // namespace

TypedFunction::TypedFunction(std::string name, const std::string& signature) : name_(std::move(name)) {
  if (name_.empty()) throw_invalid("a typed function needs a name");
  SignatureReader reader(signature);
  arguments_ = reader.arguments();
  result_ = reader.result();
  signature_ = reader.of_cpp();
  id_ = rpc::function_id(name_, signature_);
  result_text_ = signature_.substr(signature_.rfind(" -> ") + std::string_view(" -> ").size());
}

void TypedFunction::encode_arguments(wire::Encoder& encoder, const py::tuple& arguments) const {
  if (arguments.size() != arguments_.size()) {
    throw_invalid("{} takes {} arguments, {}, and got {}", name_, arguments_.size(), signature_,
                  arguments.size());
  }
  for (std::size_t i = 0; i < arguments_.size(); ++i)
    encode_checked(encoder, arguments_[i], py::object(arguments[i]),
                   fmt::format("argument {} of {}", i + 1, name_));
}

py::tuple TypedFunction::decode_arguments(wire::Decoder& decoder) const {
  try {
    py::list all;
    for (const WireType& type : arguments_) all.append(decode(decoder, type));
    decoder.expect_end();
    return py::tuple(all);
  } catch (const py::error_already_set& error) {  // must not leave this thread
    throw_invalid("arguments of {}: {}", name_, error.what());
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("arguments of {}: {}", name_, error.message()));
  }
}

void TypedFunction::encode_result(wire::Encoder& encoder, const py::object& result) const {
  encode_checked(encoder, result_, result, fmt::format("the result of {}", name_));
}

bool TypedFunction::has_value() const { return result_.codec != nullptr || !result_.parts.empty(); }

py::object TypedFunction::decode_result(wire::Payload& payload) const {
  try {
    wire::Decoder decoder(payload);
    py::object result = decode(decoder, result_);
    decoder.expect_end();
    return result;
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("the result of {}: {}", name_, error.message()));
  }
}

rpc::FunctionEntry serve_typed(const std::shared_ptr<const TypedFunction>& type, py::object function) {
  rpc::FunctionEntry entry{type->name(), type->signature()};
  entry.run = [type, held = Object(std::move(function))](rpc::Execution& execution) {
    keep_thread_state();
    const py::gil_scoped_acquire gil;
    const py::tuple arguments = type->decode_arguments(execution.arguments);
    PythonFunctions& functions = execution.worker.extension<PythonFunctions>();
    return rpc::Outcome{nullptr,
                        functions.invoke<rpc::ValuePtr>(execution.worker, held.get(), arguments, py::dict(),
                                                        [type](const py::object& result) -> rpc::ValuePtr {
                                                          return std::make_shared<TypedValue>(type, result);
                                                        })};
  };
  return entry;
}

}  // namespace torchspan::python
