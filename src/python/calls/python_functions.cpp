#include "python/calls/python_functions.h"

#include <fmt/format.h>
#include <utility>

namespace torchspan::python {

namespace py = pybind11;

namespace {

/// Whether the result of `function` is there later: of async functions, and of those that return futures.
bool is_later(const Hooks& hooks, PyObject* function, PyObject* result) {
  return PyCoro_CheckExact(result) ||
         reinterpret_cast<PyObject*>(Py_TYPE(result)) == hooks.later_type.get().ptr() ||
         PyObject_HasAttrString(function, "_wrapped_async_rpc_function") != 0;
}

/// What `body` returns; what it raises in Python is thrown as a PythonError. With the GIL.
template <class F>
auto described(Packer& packer, F&& body) {
  try {
    return body();
  } catch (const py::error_already_set& error) {
    throw PythonFunctions::describe(packer, exception_of(error));
  } catch (const py::builtin_exception& error) {  // of a file of this room
    error.set_error();
    throw PythonFunctions::describe(packer, py::error_already_set().value());
  }
}

template <class R>
class ReplyOf final : public Reply {
 public:
  using Convert = std::function<R(const py::object&)>;
  ReplyOf(Promise<R> promise, Convert convert, std::shared_ptr<Packer> packer)
      : promise_(std::move(promise)), convert_(std::move(convert)), packer_(std::move(packer)) {}
  void succeed(const py::object& result) override {
    try {
      promise_.set_value(described(*packer_, [&] { return convert_(result); }));
    } catch (...) {
      promise_.set_error(std::current_exception());
    }
  }
  void fail(const py::object& exception) override {
    promise_.set_error(std::make_exception_ptr(PythonFunctions::describe(*packer_, exception)));
  }

 private:
  Promise<R> promise_;
  const Convert convert_;
  const std::shared_ptr<Packer> packer_;
};

}  // namespace

py::object exception_of(const py::error_already_set& error) {
  py::object exception = error.value();
  if (error.trace()) PyException_SetTraceback(exception.ptr(), error.trace().ptr());
  return exception;
}

void PythonFunctions::attach(rpc::Registrar& registrar) {
  answer_greetings(registrar);
  if (!packer_->hooks().pickles) registrar.intercept(operator_refusal_);
}

rpc::EnvironmentValuePtr PythonFunctions::OperatorRefusal::incoming(const rpc::CallInfo& call,
                                                                    std::span<at::Tensor> /*tensors*/,
                                                                    BytesView /*header*/) {
  const bool refused = call.type == rpc::kCallOperator || call.type == rpc::kCreateByOperator ||
                       call.type == rpc::kCallMethod || call.type == rpc::kCreateByMethod;
  if (call.reply || !refused) return nullptr;
  throw Error(
      ErrorKind::kDenied,
      "this worker was started with functions=[…], and runs no operators for others: add a function, such as "
      "torch.add, there, on all workers");
}

FunctionTable PythonFunctions::table() {
  FunctionTable functions;
  functions.add(kCall, kCreate, kFetch);
  functions.add_error<PythonError>("PythonError");
  return functions;
}

PythonError PythonFunctions::describe(Packer& packer, const py::object& exception) {
  const py::tuple description = packer.hooks().describe.get()(exception);
  return {packer.pack(description).bytes,
          fmt::format("{}: {}", description[0].cast<std::string>(), description[1].cast<std::string>())};
}

template <class R>
Future<R> PythonFunctions::run(const Worker& worker, Pack call) {
  keep_thread_state();
  const py::gil_scoped_acquire gil;
  const py::tuple parts = described(*packer_, [&]() -> py::tuple { return packer_->unpack(call); });
  if (parts.size() != 3) throw_invalid("a call of Python has a function, args and kwargs");
  call = {};  // the function may free its arguments
  return invoke<R>(worker, parts[0], parts[1], parts[2],
                   [packer = packer_.get()](const py::object& result) -> R {
                     if constexpr (std::is_same_v<R, Object>) {
                       return Object(result);
                     } else {
                       return packer->pack(result);
                     }
                   });
}

template <class R>
Future<R> PythonFunctions::invoke(const Worker& worker, const py::object& function, const py::tuple& args,
                                  const py::dict& kwargs, std::function<R(const py::object&)> convert) {
  Promise<R> promise(worker.backend()->continuations());
  Future<R> future = promise.future();
  try {
    described(*packer_, [&] {
      PyObject* const made = PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr());
      if (made == nullptr) throw py::error_already_set();
      const auto result = py::reinterpret_steal<py::object>(made);
      const Hooks& hooks = packer_->hooks();
      if (!is_later(hooks, function.ptr(), made)) return promise.set_value(convert(result));
      const std::shared_ptr<Reply> reply =
          std::make_shared<ReplyOf<R>>(std::move(promise), std::move(convert), packer_);
      hooks.later.get()(result, reply);
    });
  } catch (...) {
    promise.set_error(std::current_exception());
  }
  return future;
}

void keep_thread_state() { thread_local const KeptThreadState until_the_thread_ends; }

Task<Pack> serve_call(Worker& worker, Pack call) {
  co_return co_await worker.extension<PythonFunctions>().run<Pack>(worker, std::move(call));
}

Task<Object> serve_creation(Worker& worker, Pack call) {
  co_return co_await worker.extension<PythonFunctions>().run<Object>(worker, std::move(call));
}

Task<Pack> serve_fetch(Worker& worker, RRef<Object> reference) {
  co_await reference.creation();
  PythonFunctions& functions = worker.extension<PythonFunctions>();
  keep_thread_state();
  const py::gil_scoped_acquire gil;
  co_return described(*functions.packer(),
                      [&] { return functions.packer()->pack(reference.local_value().get()); });
}

template Future<Pack> PythonFunctions::run(const Worker&, Pack);
template Future<Object> PythonFunctions::run(const Worker&, Pack);
template Future<rpc::ValuePtr> PythonFunctions::invoke(const Worker&, const py::object&, const py::tuple&,
                                                       const py::dict&,
                                                       std::function<rpc::ValuePtr(const py::object&)>);

}  // namespace torchspan::python

namespace torchspan {

void Wire<python::PythonError>::encode(wire::Encoder& encoder, const python::PythonError& value) {
  encoder.bytes().put_string(
      {reinterpret_cast<const char*>(value.description.data()), value.description.size()});
  encoder.bytes().put_string(value.text);
}

python::PythonError Wire<python::PythonError>::decode(wire::Decoder& decoder) {
  const std::string description = decoder.bytes().get_string();
  const auto raw = std::as_bytes(std::span(description));
  return {Bytes(raw.begin(), raw.end()), decoder.bytes().get_string()};
}

}  // namespace torchspan
