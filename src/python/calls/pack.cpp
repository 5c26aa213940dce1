#include "python/calls/pack.h"

#include <bit>
#include <fmt/format.h>
#include <limits>
#include <unordered_set>

#include <torch/csrc/autograd/python_variable.h>

#include "core/api/throw_invalid.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

/// The first byte of each value. The numbers are sent on the wire.
enum class Tag : std::uint8_t {
  kNone,
  kFalse,
  kTrue,
  kInt,       ///< i64
  kLargeInt,  ///< text in base 16
  kFloat,     ///< f64
  kStr,       ///< UTF-8
  kBytes,
  kList,   ///< u32 count, values
  kTuple,  ///< as kList
  kDict,   ///< u32 count, keys and values in turn
  kTensor,
  kReference,
  kFunction,  ///< the name
  kPickled,   ///< bytes of protocol 5; tensors and references are persistent ids: the places in the pack
};

/// Deeper values are pickled, so that one that contains itself ends.
constexpr int kDepth = 32;

bool is_reference(PyObject* object) { return py::isinstance<RRef<Object>>(object); }

/// A number of elements or bytes as it is sent. Throws ValueError for one that is too large.
std::uint32_t count_of(std::size_t number, const char* what) {
  if (number <= std::numeric_limits<std::uint32_t>::max()) return static_cast<std::uint32_t>(number);
  throw py::value_error(
      fmt::format("torchspan: a value with {} {} cannot be sent: send fewer than 2^32 at once, or tensors, "
                  "which have no limit",
                  number, what));
}

/// New references from the C API; throws what it raised.
py::object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

std::string_view utf8_of(PyObject* str) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(str, &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<std::size_t>(size)};
}

BytesView view_of(PyObject* bytes) {
  return {reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(bytes)),
          static_cast<std::size_t>(PyBytes_GET_SIZE(bytes))};
}

/// After the interpreter has ended, its objects are gone.
void drop(PyObject* object) {
  if (Py_IsInitialized() == 0) return;
  const PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF(object);
  PyGILState_Release(gil);
}

py::bytes to_bytes(BytesView bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

}  // namespace

Object::Object(pybind11::object object) : held_(object.release().ptr(), drop) {}

/// Writes plain values.
class Packer::Writer {
 public:
  Writer(Packer& packer, Pack& into) : packer_(packer), into_(into) {}

  /// Writes (function, args, kwargs); false if the function has no name or a value is not plain.
  bool call(PyObject* function, PyObject* args, PyObject* kwargs) {
    const py::object name = packer_.found(packer_.names_, packer_.hooks_.name_of, function);
    if (name.is_none()) return false;
    tag(Tag::kTuple);
    bytes_.put(std::uint32_t{3});
    tag(Tag::kFunction);
    bytes_.put_string(utf8_of(name.ptr()));
    return value(args, 1) && value(kwargs, 1);
  }
  /// False for what is not plain; what was written then is of no use. `not_plain` is it.
  bool value(PyObject* object, int depth = 0) {
    if (object == Py_None) return tag(Tag::kNone);
    if (PyBool_Check(object)) return tag(object == Py_True ? Tag::kTrue : Tag::kFalse);
    if (PyLong_CheckExact(object)) return integer(object);
    if (PyFloat_CheckExact(object)) {
      tag(Tag::kFloat);
      bytes_.put(PyFloat_AS_DOUBLE(object));
      return true;
    }
    if (PyUnicode_CheckExact(object)) return string(object);
    if (PyBytes_CheckExact(object)) {
      tag(Tag::kBytes);
      count(static_cast<std::size_t>(PyBytes_GET_SIZE(object)));
      bytes_.put_bytes(view_of(object));
      return true;
    }
    if (THPVariable_CheckExact(object)) {
      tag(Tag::kTensor);
      bytes_.put(static_cast<std::uint32_t>(into_.tensors.size()));
      into_.tensors.push_back(THPVariable_Unpack(object));
      return true;
    }
    if (depth < kDepth && PyTuple_CheckExact(object)) {
      return sequence(Tag::kTuple, object, PyTuple_GET_SIZE(object), depth);
    }
    if (depth < kDepth && PyList_CheckExact(object) && seen_.insert(object).second) {
      return sequence(Tag::kList, object, PyList_GET_SIZE(object), depth);
    }
    if (depth < kDepth && PyDict_CheckExact(object) && seen_.insert(object).second)
      return dict(object, depth);
    if (is_reference(object)) {
      tag(Tag::kReference);
      bytes_.put(static_cast<std::uint32_t>(into_.references.size()));
      into_.references.push_back(py::cast<const RRef<Object>&>(object));
      return true;
    }
    not_plain_ = object;
    return false;
  }
  /// The first object that is not plain; null: the function.
  PyObject* not_plain() const { return not_plain_; }
  Bytes take() { return bytes_.take(); }

 private:
  bool tag(Tag tag) {
    bytes_.put(static_cast<std::uint8_t>(tag));
    return true;
  }
  void count(std::size_t number) { bytes_.put(count_of(number, "elements")); }
  bool integer(PyObject* object) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) {
      tag(Tag::kInt);
      bytes_.put(static_cast<std::int64_t>(number));
      return true;
    }
    const py::object text = checked(PyNumber_ToBase(object, 16));
    tag(Tag::kLargeInt);
    bytes_.put_string(utf8_of(text.ptr()));
    return true;
  }
  bool string(PyObject* object) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == nullptr) {  // half of a surrogate pair
      PyErr_Clear();
      not_plain_ = object;
      return false;
    }
    tag(Tag::kStr);
    count(static_cast<std::size_t>(size));
    bytes_.put_bytes(std::as_bytes(std::span(text, static_cast<std::size_t>(size))));
    return true;
  }
  bool sequence(Tag kind, PyObject* object, Py_ssize_t size, int depth) {
    tag(kind);
    count(static_cast<std::size_t>(size));
    const bool list = kind == Tag::kList;
    for (Py_ssize_t i = 0; i < size; ++i) {
      if (!value(list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i), depth + 1)) return false;
    }
    return true;
  }
  bool dict(PyObject* object, int depth) {
    tag(Tag::kDict);
    count(static_cast<std::size_t>(PyDict_GET_SIZE(object)));
    PyObject *key = nullptr, *held = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &held) != 0) {
      if (!value(key, depth + 1) || !value(held, depth + 1)) return false;
    }
    return true;
  }

  Packer& packer_;
  Pack& into_;
  ByteWriter bytes_;
  std::unordered_set<PyObject*> seen_;
  PyObject* not_plain_ = nullptr;
};

class Packer::Reader {
 public:
  Reader(Packer& packer, const Pack& from) : packer_(packer), from_(from), bytes_(from.bytes) {}

  py::object value(int depth = 0) {
    if (depth > kDepth) throw_invalid("a Python value is nested too deep");
    const auto tag = static_cast<Tag>(bytes_.get<std::uint8_t>());
    switch (tag) {
      case Tag::kNone:
        return py::none();
      case Tag::kFalse:
        return py::bool_(false);
      case Tag::kTrue:
        return py::bool_(true);
      case Tag::kInt:
        return checked(PyLong_FromLongLong(bytes_.get<std::int64_t>()));
      case Tag::kLargeInt:
        return checked(PyLong_FromString(bytes_.get_string().c_str(), nullptr, 16));
      case Tag::kFloat:
        return checked(PyFloat_FromDouble(bytes_.get<double>()));
      case Tag::kStr: {
        const BytesView text = counted();
        return checked(PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(text.data()),
                                            static_cast<Py_ssize_t>(text.size()), nullptr));
      }
      case Tag::kBytes:
        return to_bytes(counted());
      case Tag::kList:
      case Tag::kTuple:
        return sequence(tag == Tag::kList, depth);
      case Tag::kDict:
        return dict(depth);
      case Tag::kTensor:
        return checked(THPVariable_Wrap(from_.tensors[place(from_.tensors.size())]));
      case Tag::kReference:
        return py::cast(from_.references[place(from_.references.size())]);
      case Tag::kFunction:
        return packer_.found(packer_.functions_, packer_.hooks_.function_of, py::str(bytes_.get_string()));
      case Tag::kPickled:
        return packer_.unpickle(counted(), from_);
    }
    throw_invalid("a Python value has the unknown tag {}", static_cast<int>(tag));
  }
  void expect_end() const { bytes_.expect_end(); }

 private:
  BytesView counted() { return bytes_.get_bytes(bytes_.get<std::uint32_t>()); }
  std::size_t place(std::size_t size) {
    const std::size_t index = bytes_.get<std::uint32_t>();
    if (index < size) return index;
    throw_invalid("a Python value names place {} of {} in its message", index, size);
  }
  py::object sequence(bool list, int depth) {
    const std::size_t size = bytes_.get_count(1);
    const auto count = static_cast<Py_ssize_t>(size);
    py::object made = checked(list ? PyList_New(count) : PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* const element = value(depth + 1).release().ptr();
      if (list) {
        PyList_SET_ITEM(made.ptr(), i, element);
      } else {
        PyTuple_SET_ITEM(made.ptr(), i, element);
      }
    }
    return made;
  }
  py::object dict(int depth) {
    py::dict made;
    for (std::size_t left = bytes_.get_count(2); left > 0; --left) {
      const py::object key = value(depth + 1);
      const py::object held = value(depth + 1);
      if (PyDict_SetItem(made.ptr(), key.ptr(), held.ptr()) != 0) throw py::error_already_set();
    }
    return std::move(made);
  }

  Packer& packer_;
  const Pack& from_;
  ByteReader bytes_;
};

Packer::Packer(Hooks hooks)
    : hooks_(std::move(hooks)),
      names_(py::dict()),
      functions_(py::dict()),
      operators_(py::dict()),
      new_pickler_(py::module_::import("torchspan._calls").attr("Pickler")),
      new_unpickler_(py::module_::import("torchspan._calls").attr("Unpickler")),
      new_buffer_(py::module_::import("io").attr("BytesIO")) {}

py::object Packer::found(const Object& known, const Object& find, py::handle key) {
  // A module's function may be replaced by another one, as pickle allows; one of functions=[…] may not.
  return hooks_.pickles ? find.get()(key) : remembered(known, find, key);
}

py::object Packer::remembered(const Object& known, const Object& find, py::handle key) {
  const py::object dict = known.get();
  PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found != nullptr) return py::reinterpret_borrow<py::object>(found);
  PyErr_Clear();  // of keys that cannot be hashed
  py::object made = find.get()(key);
  if (!made.is_none() && PyDict_SetItem(dict.ptr(), key.ptr(), made.ptr()) != 0) PyErr_Clear();
  return made;
}

std::string Packer::operator_of(py::handle function) {
  if (PyFunction_Check(function.ptr()) || PyType_Check(function.ptr()) || PyMethod_Check(function.ptr()))
    return {};
  const py::object name = remembered(operators_, hooks_.operator_of, function);
  return name.is_none() ? std::string() : std::string(utf8_of(name.ptr()));
}

void Packer::check_may_pickle(PyObject* not_plain) const {
  if (hooks_.pickles) return;
  const py::object type = py::type::of(py::handle(not_plain));
  throw py::type_error(
      fmt::format("torchspan: a value of type {} would have to be pickled, and this worker was started with "
                  "functions=[…]: "
                  "send tensors, numbers, strings, bytes, and lists, tuples and dicts of them",
                  py::str(type.attr("__qualname__")).cast<std::string>()));
}

Pack Packer::pack(py::handle value) {
  Pack made;
  Writer writer(*this, made);
  if (writer.value(value.ptr())) {
    made.bytes = writer.take();
  } else {
    check_may_pickle(writer.not_plain());
    pickle(value, made);
  }
  return made;
}

namespace {

/// Parameters among the arguments themselves arrive as tensors with their gradients, whatever the other arguments are; those
/// inside of objects stay Parameters.
py::object with_plain_parameters(py::handle arguments) {
  const auto plain = [](py::handle value) {
    const bool is_parameter = THPVariable_CheckExact(value.ptr()) != 0 &&
                              Py_TYPE(value.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
    if (!is_parameter) return py::reinterpret_borrow<py::object>(value);
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.view_as(tensor)));
  };
  if (PyDict_Check(arguments.ptr())) {
    py::dict named;
    for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(arguments)) named[name] = plain(value);
    return std::move(named);
  }
  py::list all;
  for (const py::handle value : arguments) all.append(plain(value));
  return py::tuple(all);
}

}  // namespace

Pack Packer::pack_call(py::handle function, py::handle args, py::handle kwargs) {
  Pack made;
  Writer writer(*this, made);
  if (writer.call(function.ptr(), args.ptr(), kwargs.ptr())) {
    made.bytes = writer.take();
    return made;
  }
  if (!hooks_.pickles && writer.not_plain() == nullptr) {
    throw py::value_error(fmt::format(
        "torchspan: {} is not among the functions=[…] with which this worker was started: add it there, "
        "on all workers",
        py::repr(function).cast<std::string>()));
  }
  check_may_pickle(writer.not_plain());
  pickle(py::make_tuple(function, with_plain_parameters(args), with_plain_parameters(kwargs)), made);
  return made;
}

void Packer::pickle(py::handle value, Pack& into) {
  into.tensors.clear();
  into.references.clear();
  const py::object buffer = new_buffer_.get()();
  const py::object pickler = new_pickler_.get()(buffer, 5);
  pickler.attr("persistent_id") = py::cpp_function([&into](py::handle object) -> py::object {
    if (Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
      into.tensors.push_back(THPVariable_Unpack(object.ptr()));
      return py::make_tuple("t", into.tensors.size() - 1);
    }
    if (!is_reference(object.ptr())) return py::none();
    into.references.push_back(py::cast<const RRef<Object>&>(object));
    return py::make_tuple("r", into.references.size() - 1);
  });
  const py::object reducers = hooks_.reducers.get()();
  if (!reducers.is_none()) pickler.attr("dispatch_table") = reducers;
  pickler.attr("dump")(value);
  const py::object bytes = buffer.attr("getvalue")();
  ByteWriter writer;
  writer.put(static_cast<std::uint8_t>(Tag::kPickled));
  writer.put(count_of(view_of(bytes.ptr()).size(), "pickled bytes"));
  writer.put_bytes(view_of(bytes.ptr()));
  into.bytes = writer.take();
}

py::object Packer::unpickle(BytesView bytes, const Pack& from) {
  if (!hooks_.pickles) {
    throw Error(
        ErrorKind::kDenied,
        "the value was pickled, and this worker was started with functions=[…], so it unpickles nothing: "
        "start all workers with the same functions");
  }
  const py::object unpickler = new_unpickler_.get()(new_buffer_.get()(to_bytes(bytes)));
  unpickler.attr("persistent_load") = py::cpp_function([&from](const py::tuple& id) -> py::object {
    const auto place = id[1].cast<std::size_t>();
    const bool tensor = id[0].cast<std::string>() == "t";
    if (place >= (tensor ? from.tensors.size() : from.references.size()))
      throw_invalid("a pickled value names a place outside of its message");
    return tensor ? checked(THPVariable_Wrap(from.tensors[place])) : py::cast(from.references[place]);
  });
  return unpickler.attr("load")();
}

py::object Packer::unpack(Pack& pack) {
  Reader reader(*this, pack);
  py::object value = reader.value();
  reader.expect_end();
  return value;
}

}  // namespace torchspan::python

namespace torchspan {

void Wire<python::Pack>::encode(wire::Encoder& encoder, const python::Pack& value) {
  wire::encode_count(encoder, value.bytes.size());
  encoder.bytes().put_bytes(value.bytes);
  wire::encode_count(encoder, value.tensors.size());
  for (const at::Tensor& tensor : value.tensors) encoder.tensor(tensor);
  wire::encode_count(encoder, value.references.size());
  for (const RRef<python::Object>& reference : value.references) wire::encode(encoder, reference);
}

python::Pack Wire<python::Pack>::decode(wire::Decoder& decoder) {
  python::Pack value;
  const BytesView bytes = decoder.bytes().get_bytes(decoder.bytes().get<std::uint32_t>());
  value.bytes.assign(bytes.begin(), bytes.end());
  value.tensors.resize(decoder.bytes().get_count(4));
  for (at::Tensor& tensor : value.tensors) tensor = decoder.tensor();
  value.references.resize(decoder.bytes().get_count(1));
  for (auto& reference : value.references) reference = wire::decode<RRef<python::Object>>(decoder);
  return value;
}

}  // namespace torchspan
