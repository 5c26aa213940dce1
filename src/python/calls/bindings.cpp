#include "python/bindings.h"

#include <algorithm>
#include <map>
#include <pybind11/stl.h>
#include <utility>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/rpc/environment.h>

#include "python/calls/python_worker.h"
#include "python/calls/raised.h"
#include "python/gil.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

/// A context of distributed autograd of the thread that made it.
class ContextHandle {
 public:
  explicit ContextHandle(std::shared_ptr<PythonWorker> worker) : worker_(std::move(worker)) {
    released(*worker_, [this] { context_ = std::make_unique<autograd::Context>(worker_->worker()); });
  }
  ~ContextHandle() { close(); }
  /// Releases the context's state, on the thread that made it.
  void close() {
    without_gil([this] { context_ = nullptr; });
  }
  std::uint64_t id() const { return context_->id(); }

 private:
  const std::shared_ptr<PythonWorker> worker_;
  std::unique_ptr<autograd::Context> context_;
};

autograd::ContextView find_context(PythonWorker& worker, std::uint64_t id) {
  return worker.worker().extension<autograd::AutogradExtension>().find(id);
}

using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;

Gradients gradients(PythonWorker& worker, std::uint64_t context) {
  return released(worker, [&] {
    Gradients all;
    for (auto& one : find_context(worker, context).gradients()) all.emplace_back(one.parameter, one.gradient);
    return all;
  });
}

/// Those of parameters whose AccumulateGrad node has hooks, as DistributedDataParallel adds: only torch's engine calls them.
Gradients hooked_gradients(PythonWorker& worker, std::uint64_t context) {
  auto all = gradients(worker, context);
  std::erase_if(all, [](const auto& one) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(one.first);
    return accumulator == nullptr || accumulator->post_hooks().empty();
  });
  return all;
}

/// Returns the gradients that the pass changed and whose hooks it has left to the caller.
Gradients backward(PythonWorker& worker, std::uint64_t context, const std::vector<at::Tensor>& roots,
                   bool retain_graph, bool fast, double timeout, double stall) {
  autograd::BackwardOptions options;
  options.retain_graph = retain_graph;
  options.mode = fast ? autograd::PassMode::kFast : autograd::PassMode::kSmart;
  options.timeout = duration_of("timeout", timeout);
  options.stall = duration_of("stall", stall);
  options.run_leaf_hooks = false;  // autograd.py runs them
  const auto raised = std::make_shared<Raised>(worker.packer());
  options.while_waiting = [raised] { raised->guard(check_signals); };
  const Gradients before =
      hooked_gradients(worker, context);  // a gradient that is held is not changed in place
  raised->released([&] { find_context(worker, context).backward(roots, std::move(options)); });
  Gradients changed = hooked_gradients(worker, context);
  std::erase_if(changed, [&](const auto& one) {
    return std::ranges::any_of(before,
                               [&](const auto& earlier) { return earlier.second.is_same(one.second); });
  });
  return changed;
}

/// `step` in the environment of the place that calls this: the call being served, the autograd context, grad mode.
py::cpp_function bound(py::object step) {
  return py::cpp_function(
      [step = std::move(step), inside = rpc::Environment::capture()](const py::args& args) {
        const rpc::EnvironmentScope scope(inside);
        return step(*args);
      });
}

/// Completes the future with an exception of Python. Unlike Future.set_exception(), which completes it with a value that raises
/// later, this lets torch.futures.wait_all() and collect_all() learn it at once.
void fail_future(const std::shared_ptr<torch::jit::PythonFutureWrapper>& future,
                 const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  python_error error;
  error.persist();
  const py::gil_scoped_release gil;
  future->fut->setError(std::make_exception_ptr(std::move(error)));
}

Hooks hooks_of(const py::object& python, bool pickles) {
  const auto hook = [&](const char* name) { return Object(python.attr(name)); };
  return {hook("name_of"),  hook("function_of"), hook("operator_of"), hook("later"), hook("Later"),
          hook("describe"), hook("rebuild"),     hook("reducers"),    hook("Error"), hook("Typed"),
          pickles};
}

/// By the names of the workers: pairs of a device here and one there.
using DevicePairs = std::map<std::string, std::vector<DeviceMap::Pair>>;

std::shared_ptr<PythonWorker> join_worker(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::string& name, int rank, int size,
                                          const std::string& master_host, std::size_t threads, double timeout,
                                          bool pickles, const py::object& hooks, const py::list& typed,
                                          const DevicePairs& device_maps) {
  const auto packer = std::make_shared<Packer>(hooks_of(hooks, pickles));
  PythonWorker::Options options;
  options.threads = threads;
  options.timeout = duration_of("rpc_timeout", timeout);
  for (const py::handle function : typed) {
    options.typed.push_back(
        serve_typed(function.attr("type").cast<std::shared_ptr<TypedFunction>>(), function.attr("function")));
  }
  return with_exceptions(*packer, [&] {
    for (const auto& [worker, pairs] : device_maps) options.device_maps.emplace(worker, DeviceMap(pairs));
    const py::gil_scoped_release gil;
    return PythonWorker::join(store, {rank, size, master_host, name}, packer, std::move(options));
  });
}

void bind_worker(py::module_& module) {
  using Call = PythonWorker::Call;
  py::class_<Call>(module, "Call")
      .def(py::init([](py::object to, py::object function, py::tuple args, py::dict kwargs, double timeout,
                       std::string name) {
             return Call{std::move(to), std::move(function), std::move(args), std::move(kwargs),
                         timeout,       std::move(name)};
           }),
           py::arg("to"), py::arg("function"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
           py::arg("name"));
  using Self = const std::shared_ptr<PythonWorker>&;
  py::class_<PythonWorker, std::shared_ptr<PythonWorker>>(module, "Worker")
      .def_property_readonly("name", [](Self self) { return self->worker().name(); })
      .def_property_readonly("rank", [](Self self) { return self->worker().rank(); })
      .def_property_readonly("runtime", [](Self self) { return self->runtime(); })
      .def_property(
          "default_timeout", [](Self self) { return to_seconds(self->worker().default_timeout()); },
          [](Self self, double seconds) {
            self->worker().set_default_timeout(duration_of("rpc_timeout", seconds));
          })
      .def("workers",
           [](Self self) {
             std::vector<std::pair<std::string, std::uint32_t>> all;
             for (const WorkerInfo& one : self->worker().workers()) all.emplace_back(one.name, one.rank);
             return all;
           })
      .def("call", [](Self self, const PythonWorker::Call& call) { return self->call(call)->wait(); })
      .def("call_async", &PythonWorker::call)
      .def("create", &PythonWorker::create)
      .def(
          "gather",
          [](Self self, const py::bytes& mine, const std::vector<std::string>& workers, double timeout) {
            const std::string_view text = mine;
            const auto raw = std::as_bytes(std::span(text));
            const Bytes bytes(raw.begin(), raw.end());
            const Duration limit = duration_of("timeout", timeout);
            const auto all =
                released(*self, [&] { return self->worker().all_gather_bytes(bytes, workers, limit); });
            py::list result;
            for (const Bytes& one : all)
              result.append(py::bytes(reinterpret_cast<const char*>(one.data()), one.size()));
            return result;
          },
          py::arg("mine"), py::arg("workers"), py::arg("timeout"))
      .def(
          "backward",
          [](Self self, std::uint64_t context, const std::vector<at::Tensor>& roots, bool retain_graph,
             bool fast, double timeout,
             double stall) { return backward(*self, context, roots, retain_graph, fast, timeout, stall); },
          py::arg("context"), py::arg("roots"), py::arg("retain_graph"), py::arg("fast"), py::arg("timeout"),
          py::arg("stall"))
      .def(
          "has_context",
          [](Self self, std::uint64_t context) {
            return self->worker().extension<autograd::AutogradExtension>().try_find(context).has_value();
          },
          py::arg("context"))
      .def(
          "gradients", [](Self self, std::uint64_t context) { return gradients(*self, context); },
          py::arg("context"))
      .def(
          "replace_gradient",
          [](Self self, std::uint64_t context, const at::Tensor& parameter, at::Tensor gradient) {
            released(*self,
                     [&] { find_context(*self, context).replace_gradient(parameter, std::move(gradient)); });
          },
          py::arg("context"), py::arg("parameter"), py::arg("gradient"))
      .def(
          "delay",
          [](Self self, double seconds) -> std::shared_ptr<CallHandle> {
            return make_pending(self->worker().delay(duration_of("seconds", seconds)), self->packer());
          },
          py::arg("seconds"))
      .def("debug", [](Self self) { return released(*self, [&] { return self->worker().debug().str(); }); })
      .def(
          "shutdown",
          [](Self self, double timeout) {
            with_exceptions(*self->packer(), [&] { PythonWorker::shutdown(self, timeout); });
          },
          py::arg("timeout"))
      .def("stop", [](Self self) { released(*self, [&] { self->stop(); }); })
      .def("stop_at_exit", &PythonWorker::stop_at_exit, py::call_guard<py::gil_scoped_release>());
  module.def("join_worker", &join_worker, py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"),
             py::arg("master_host"), py::arg("threads"), py::arg("timeout"), py::arg("pickles"),
             py::arg("hooks"), py::arg("typed") = py::list(), py::arg("device_maps") = DevicePairs());
}

void bind_reference(py::module_& module) {
  using Reference = RRef<Object>;
  py::class_<Reference>(module, "RRef", py::dynamic_attr())
      .def(py::init([](py::object value, const py::object& /*type_hint*/) {
             const auto worker = py::module_::import("torchspan._calls")
                                     .attr("worker_of_reference")()
                                     .cast<std::shared_ptr<PythonWorker>>();
             return Reference(worker->worker(), Object(std::move(value)));
           }),
           py::arg("value"), py::arg("type_hint") = py::none())
      .def("is_owner", &Reference::is_owner)
      .def("confirmed_by_owner", &Reference::confirmed_by_owner)
      .def("_owner",
           [](const Reference& self) {
             const WorkerInfo owner = self.owner();
             return std::pair(owner.name, owner.rank);
           })
      .def("owner_name", &Reference::owner_name)
      .def("to_here", &fetch, py::arg("timeout") = -1.0)
      .def("local_value", &local_value)
      .def("_created", [](const Reference& self) { return creation_of(self); })
      .def("__repr__", &Reference::str);
}

}  // namespace

void bind_calls(py::module_& module) {
  py::class_<CallHandle, std::shared_ptr<CallHandle>>(module, "CallHandle")
      .def("done", &CallHandle::done)
      .def("wait", &CallHandle::wait)
      .def("on_done", &CallHandle::on_done, py::arg("callback"));
  py::class_<Reply, std::shared_ptr<Reply>>(module, "Reply")
      .def("succeed", &Reply::succeed, py::arg("result"))
      .def("fail", &Reply::fail, py::arg("exception"));
  py::class_<ContextHandle>(module, "Context")
      .def(py::init<std::shared_ptr<PythonWorker>>(), py::arg("worker"))
      .def_property_readonly("id", &ContextHandle::id)
      .def("close", &ContextHandle::close);
  py::class_<TypedFunction, std::shared_ptr<TypedFunction>>(module, "TypedFunction")
      .def(py::init([](const std::string& name, const std::string& signature) {
             try {
               return std::make_shared<TypedFunction>(name, signature);
             } catch (const Error& error) {
               throw py::value_error(error.what());
             }
           }),
           py::arg("name"), py::arg("signature"))
      .def_property_readonly("name", &TypedFunction::name)
      .def_property_readonly("signature", &TypedFunction::signature);
  bind_worker(module);
  bind_reference(module);
  module.def(
      "check_seconds",
      [](const std::string& name, double seconds) { static_cast<void>(duration_of(name.c_str(), seconds)); },
      py::arg("name"), py::arg("seconds"));
  module.def("bound", &bound, py::arg("step"));
  module.def("fail_future", &fail_future, py::arg("future"), py::arg("exception"));
}

}  // namespace torchspan::python
