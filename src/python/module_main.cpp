// torchspan._C: what the package `torchspan` needs of the library.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"
#include "python/c10d/backend.h"
#include "python/errors.h"

namespace torchspan::python {
namespace {

using Milliseconds = std::chrono::milliseconds;

std::shared_ptr<World> join_world(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const std::string& master_host, Milliseconds timeout) {
  return with_torch_errors(
      [&] {
        return World::join(*store, Place{rank, size, master_host}, timeout);
      },
      false);
}

c10::intrusive_ptr<Backend> make_backend(const std::shared_ptr<World>& world, const std::vector<int>& ranks,
                                         const Backend::Names& names, Milliseconds timeout) {
  return with_torch_errors([&] { return Backend::make(world, ranks, names, timeout); }, false);
}

/// Lets a world end while Python knows it. A weak reference of Python's would be one to the wrapper of a World, which ends
/// before the World does.
struct ObservedWorld {
  std::weak_ptr<World> world;
};

/// A part of the program in the trace, from its construction to close().
class OpenSpan {
 public:
  OpenSpan(std::shared_ptr<Runtime> runtime, const std::string& name, std::uint64_t number)
      : runtime_(std::move(runtime)),
        scope_(std::make_unique<SpanScope>(runtime_->spans, SpanKind::kUser, name, number)) {}
  void close() { scope_ = nullptr; }

 private:
  const std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<SpanScope> scope_;
};

void bind_trace(pybind11::module_& module) {
  pybind11::class_<OpenSpan>(module, "Span").def("close", &OpenSpan::close);
  pybind11::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime")
      .def(
          "span",
          [](std::shared_ptr<Runtime> self, const std::string& name, std::uint64_t number) {
            return std::make_unique<OpenSpan>(std::move(self), name, number);
          },
          pybind11::arg("name"), pybind11::arg("number"))
      .def(
          "log_scalar",
          [](Runtime& self, const std::string& name, double value, std::optional<std::int64_t> step) {
            self.check_process();
            self.scalars.add(name, value, step, self.executor.now());
          },
          pybind11::arg("name"), pybind11::arg("value"), pybind11::arg("step"));
}

}  // namespace
}  // namespace torchspan::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace ours = torchspan::python;
  using ours::ObservedWorld;
  pybind11::module_::import("torch.distributed");  // registers the base class
  module.attr("version") = TORCHSPAN_VERSION;
  ours::bind_trace(module);
  pybind11::class_<ours::World, std::shared_ptr<ours::World>>(module, "World")
      .def_property_readonly("runtime", &ours::World::shared_runtime)
      .def(
          "leave",
          [](ours::World& world, ours::Milliseconds timeout) {
            ours::with_torch_errors([&] { world.leave(timeout); });
          },
          pybind11::arg("timeout"), pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("observe", [](const std::shared_ptr<ours::World>& world) { return ObservedWorld{world}; });
  pybind11::class_<ObservedWorld>(module, "ObservedWorld").def("get", [](const ObservedWorld& observed) {
    return observed.world.lock();
  });
  pybind11::class_<ours::Backend, c10d::Backend, c10::intrusive_ptr<ours::Backend>>(module, "Backend")
      .def_property_readonly("world", &ours::Backend::world);
  module.def("join_world", torch::wrap_pybind_function_no_gil(ours::join_world), pybind11::arg("store"),
             pybind11::arg("rank"), pybind11::arg("size"), pybind11::arg("master_host"),
             pybind11::arg("timeout"));
  module.def(
      "make_backend",
      [](const std::shared_ptr<ours::World>& world, const std::vector<int>& ranks, const std::string& backend,
         const std::string& group, bool ends_world, ours::Milliseconds timeout) {
        const pybind11::gil_scoped_release released;
        return ours::make_backend(world, ranks, {backend, group, ends_world}, timeout);
      },
      pybind11::arg("world"), pybind11::arg("ranks"), pybind11::arg("backend"), pybind11::arg("group"),
      pybind11::arg("ends_world"), pybind11::arg("timeout"));
  ours::bind_rpc(module);
  ours::bind_calls(module);
  ours::bind_optimizers(module);
  ours::bind_checkpoints(module);
  ours::bind_pipeline(module);
}
