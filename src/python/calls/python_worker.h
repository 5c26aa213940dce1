#pragma once
#include <fmt/format.h>
#include <map>
#include <memory>
#include <pybind11/pybind11.h>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <torchspan/autograd.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/rpc/service.h>

#include "python/calls/python_functions.h"
#include "python/calls/typed.h"
#include "python/job.h"

namespace torchspan::python {

/// Throws `error` as an exception of Python: that of a function on another worker as its own type, an Error as
/// torchspan.Error. Needs the GIL.
[[noreturn]] void raise(Packer& packer, const std::exception_ptr& error);

/// Runs `body`, with or without the GIL; what it throws becomes an exception of Python. Needs the GIL when `body` ends.
template <class F>
auto with_exceptions(Packer& packer, F&& body) {
  try {
    return body();
  } catch (const Error&) {
    raise(packer, std::current_exception());
  } catch (const PythonError&) {
    raise(packer, std::current_exception());
  }
}

/// The parameter `name` of Python, in seconds. Times of centuries, and infinity, have no end. Throws ValueError for a negative
/// one and for NaN.
inline Duration duration_of(const char* name, double seconds) {
  if (!(seconds >= 0)) {
    throw pybind11::value_error(
        fmt::format("torchspan: {} is {}; expected a number of seconds, 0 or more", name, seconds));
  }
  if (!(seconds < 9e9)) return Duration::max();
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

/// A call that was made: Python's view of its Future. Used with the GIL.
class CallHandle {
 public:
  virtual ~CallHandle() = default;
  virtual bool done() const = 0;
  /// Waits without the GIL, drives the transport meanwhile, and returns the result or throws. Ctrl-C ends it.
  virtual pybind11::object wait() = 0;
  /// Calls `callback` once, on a thread of the pool or, if it is done, here.
  virtual void on_done(pybind11::object callback) = 0;
};

/// A worker whose functions are Python's: calls, creations and contexts of distributed autograd. Thread-safe.
class PythonWorker {
 public:
  struct Options {
    std::size_t threads = 16;  ///< functions that run at the same time
    Duration timeout = std::chrono::seconds(60);
    std::vector<rpc::FunctionEntry> typed = {};  ///< served to workers of C++
    std::map<std::string, DeviceMap> device_maps = {};
  };

  /// Joins and serves; returns when all workers of a fixed world have joined, or all members of an open one know this worker.
  /// `store`: as for Job. Throws Error. Without the GIL.
  static std::shared_ptr<PythonWorker> join(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                                            std::shared_ptr<Packer> packer, Options options);

  /// A call of a function of Python.
  struct Call {
    pybind11::object to;  ///< a name or a rank
    pybind11::object function;
    pybind11::tuple args;
    pybind11::dict kwargs;
    double timeout;    ///< seconds; -1: the default; 0: no limit
    std::string name;  ///< of the function, in errors and traces
  };
  /// Operators of LibTorch run without Python on the other worker. With the GIL.
  std::shared_ptr<CallHandle> call(const Call& call);
  RRef<Object> create(const Call& call);

  Worker& worker() { return service_->worker(); }
  const std::shared_ptr<Packer>& packer() const { return packer_; }
  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  /// Waits until no worker has outstanding calls, then leaves together with the others; in an open world waits for this
  /// worker's own, and rank 0 for the others to leave. A signal handler that raises ends the wait: then the worker leaves at
  /// once. With the GIL.
  static void shutdown(const std::shared_ptr<PythonWorker>& self, double timeout);
  /// Leaves at once.
  void stop();
  /// Leaves at the end of the program, which may have left functions that never end: they are abandoned.
  void stop_at_exit();

 private:
  PythonWorker(Job& job, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Packer> packer,
               Options options);
  void leave(Duration limit);
  void tell_end();
  /// The request without its payload.
  rpc::Request make_request(wire::MessageType type, const Call& call);
  rpc::Request make_python_request(wire::MessageType type, std::uint64_t function, const Call& call);
  rpc::Request make_typed_request(wire::MessageType message, const TypedFunction& type, const Call& call);
  std::shared_ptr<CallHandle> call_typed(const std::shared_ptr<TypedFunction>& type, const Call& call);
  /// Null for functions of Python.
  std::shared_ptr<TypedFunction> type_of(const pybind11::object& function) const;

  const OwnerProcess process_;
  const c10::intrusive_ptr<c10d::Store> store_;  ///< null: the workers meet at TorchSpan's
  const std::shared_ptr<Packer> packer_;
  const std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<Observation> observation_;  ///< ends after the service, so that it sees all of its work
  std::unique_ptr<rpc::WorkerService> service_;
};

/// Runs `body` without the GIL; an Error becomes an exception of Python.
template <class F>
auto released(PythonWorker& worker, F&& body) {
  return with_exceptions(*worker.packer(), [&] {
    const pybind11::gil_scoped_release gil;
    return body();
  });
}

/// A call whose future completes without a value.
std::shared_ptr<CallHandle> make_pending(Future<void> future, std::shared_ptr<Packer> packer);
/// The value of a reference, from its owner; on the owner the value itself. These three: with the GIL.
pybind11::object fetch(const RRef<Object>& reference, double timeout);
pybind11::object local_value(const RRef<Object>& reference);
/// Completes when the value has been created, or fails as the creation did.
std::shared_ptr<CallHandle> creation_of(const RRef<Object>& reference);

}  // namespace torchspan::python
