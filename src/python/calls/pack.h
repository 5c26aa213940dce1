#pragma once
#include <Python.h>
#include <memory>
#include <pybind11/pybind11.h>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/rpc/worker.h>

namespace torchspan::python {

/// A Python object that threads without the GIL may copy and drop. Empty by default.
class Object {
 public:
  Object() = default;
  /// Needs the GIL.
  explicit Object(pybind11::object object);

  explicit operator bool() const { return held_ != nullptr; }
  /// A new reference. Needs the GIL.
  pybind11::object get() const { return pybind11::reinterpret_borrow<pybind11::object>(held_.get()); }

 private:
  std::shared_ptr<PyObject> held_;
};

/// A Python value on its way: its bytes, and the tensors and references whose places they name. Needs no GIL.
struct Pack {
  Bytes bytes;
  std::vector<at::Tensor> tensors;
  std::vector<RRef<Object>> references;
};

/// What the Python side of the package supplies, torchspan/_calls.py. Used with the GIL.
struct Hooks {
  Object name_of;       ///< (function) -> the name by which the others know it, or None
  Object function_of;   ///< (name) -> the function; raises for an unknown one
  Object operator_of;   ///< (function) -> "aten::add", or None
  Object later;         ///< (result, reply): answers once an awaitable result is there
  Object later_type;    ///< the type of results that `later` takes, beside coroutines
  Object describe;      ///< (exception) -> what rebuild() takes, as a tuple of plain values
  Object rebuild;       ///< (description, worker's name) -> an exception
  Object reducers;      ///< () -> a dispatch table of pickle, or None
  Object error_type;    ///< of what the library throws: (kind, text)
  Object typed_type;    ///< of functions with a TypedFunction, their attribute `type`
  bool pickles = true;  ///< false: functions were registered, and only they and plain values travel
};

/// Python values to packs and back. None, bool, int, float, str, bytes, lists, tuples, dicts, tensors, references and
/// functions that have a name are written as they are; a value that holds anything else, or the same list twice, is pickled
/// as a whole, its tensors apart. With the GIL.
class Packer {
 public:
  explicit Packer(Hooks hooks);

  /// Throws the Python exceptions of pickling; TypeError for what is not plain, if nothing may be pickled.
  Pack pack(pybind11::handle value);
  /// Packs (function, args, kwargs).
  Pack pack_call(pybind11::handle function, pybind11::handle args, pybind11::handle kwargs);
  /// Any bytes give a value, or throw Error{kInvalid}, or what unpickling raises. Throws Error{kDenied} for pickled values
  /// if nothing may be pickled.
  pybind11::object unpack(Pack& pack);
  const Hooks& hooks() const { return hooks_; }
  /// "aten::add" for torch.add; empty for other functions.
  std::string operator_of(pybind11::handle function);

 private:
  class Writer;
  class Reader;
  /// The same, remembered only where functions are registered.
  pybind11::object found(const Object& known, const Object& find, pybind11::handle key);
  /// What `find` returns for `key`; asked once for each key that it knows.
  static pybind11::object remembered(const Object& known, const Object& find, pybind11::handle key);
  void check_may_pickle(PyObject* not_plain) const;
  void pickle(pybind11::handle value, Pack& into);
  pybind11::object unpickle(BytesView bytes, const Pack& from);

  const Hooks hooks_;
  const Object names_, functions_, operators_;  ///< dicts of what the hooks found
  const Object new_pickler_, new_unpickler_, new_buffer_;
};

}  // namespace torchspan::python

template <>
struct torchspan::Wire<torchspan::python::Pack> {
  static std::string name() { return "PythonValue"; }
  static void encode(wire::Encoder& encoder, const python::Pack& value);
  static python::Pack decode(wire::Decoder& decoder);
};
