#pragma once
#include <functional>
#include <memory>
#include <string>

#include <torchspan/core/task.h>
#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/worker.h>

#include "python/calls/pack.h"
#include "python/greeting.h"

namespace torchspan::python {

/// An exception of a Python function, as Hooks::describe made it. The caller gets it as an exception of Python.
class PythonError : public std::exception {
 public:
  PythonError(Bytes description, std::string text)
      : description(std::move(description)), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }

  Bytes description;  ///< a Pack's, of plain values
  std::string text;   ///< "ValueError: negative"
};

/// The exception with its traceback. Needs the GIL.
pybind11::object exception_of(const pybind11::error_already_set& error);

/// Where the result of an awaitable goes; with the GIL. The first of succeed() and fail() counts.
class Reply {
 public:
  virtual ~Reply() = default;
  virtual void succeed(const pybind11::object& result) = 0;
  virtual void fail(const pybind11::object& exception) = 0;
};

/// Runs Python functions for other workers: each on a thread of the pool, which takes the GIL. The Python side of a worker
/// that C++ functions of its table find.
class PythonFunctions final : public rpc::Extension {
 public:
  explicit PythonFunctions(std::shared_ptr<Packer> packer) : packer_(std::move(packer)) {}
  void attach(rpc::Registrar& registrar) override;

  /// The functions that all workers of Python serve.
  static FunctionTable table();

  const std::shared_ptr<Packer>& packer() const { return packer_; }
  /// Calls what `call` packs, and packs or keeps the result.
  template <class R>
  Future<R> run(const Worker& worker, Pack call);
  /// Calls `function`, also one whose result is there later, and completes with what `convert` makes of it. With the GIL.
  template <class R>
  Future<R> invoke(const Worker& worker, const pybind11::object& function, const pybind11::tuple& args,
                   const pybind11::dict& kwargs, std::function<R(const pybind11::object&)> convert);
  /// The current Python exception, for the caller.
  static PythonError describe(Packer& packer, const pybind11::object& exception);

 private:
  /// Refuses operators of LibTorch, TorchScript and its methods, where only registered functions may be called.
  class OperatorRefusal final : public rpc::Interceptor {
   public:
    std::string_view name() const override { return "torchspan.python.operators"; }
    Bytes outgoing(const rpc::CallInfo& /*call*/, std::span<at::Tensor> /*tensors*/) override { return {}; }
    void undo(const rpc::CallInfo& /*call*/, BytesView /*header*/) override {}
    rpc::EnvironmentValuePtr incoming(const rpc::CallInfo& call, std::span<at::Tensor> tensors,
                                      BytesView header) override;
  };

  const std::shared_ptr<Packer> packer_;
  OperatorRefusal operator_refusal_;
};

/// Keeps Python's state of this thread until the interpreter ends, so that a function need not make one.
void keep_thread_state();

Task<Pack> serve_call(Worker& worker, Pack call);
Task<Object> serve_creation(Worker& worker, Pack call);
Task<Pack> serve_fetch(Worker& worker, RRef<Object> reference);
inline constexpr Function<serve_call> kCall{"torchspan.python.call"};
inline constexpr Function<serve_creation> kCreate{"torchspan.python.create"};
inline constexpr Function<serve_fetch> kFetch{"torchspan.python.fetch"};

}  // namespace torchspan::python

template <>
struct torchspan::Wire<torchspan::python::PythonError> {
  static std::string name() { return "PythonError"; }
  static void encode(wire::Encoder& encoder, const python::PythonError& value);
  static python::PythonError decode(wire::Decoder& decoder);
};
