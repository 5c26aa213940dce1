#include "python/bindings.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <utility>

#include "python/errors.h"
#include "python/rpc/agent.h"

namespace torchspan::python {
namespace {

namespace torch_rpc = torch::distributed::rpc;

/// The options of a worker, as torch.distributed.rpc passes them.
struct RpcOptions : torch_rpc::RpcBackendOptions {
  RpcOptions(int threads, float rpc_timeout, std::string init_method)
      : RpcBackendOptions(rpc_timeout, std::move(init_method)), threads(threads) {
    TORCH_CHECK_VALUE(threads > 0, "num_worker_threads is ", threads, "; expected at least 1");
  }
  int threads;
  std::unordered_map<std::string, TorchDeviceMap> device_maps;
  std::vector<c10::Device> devices;
};

using Departure = std::function<void(const std::string&, const std::string&)>;

std::shared_ptr<Agent> join_rpc(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                                const RpcOptions& options, Departure on_departure) {
  Agent::Options all;
  all.threads = options.threads;
  all.timeout = std::chrono::milliseconds(
      static_cast<std::int64_t>(options.rpcTimeoutSeconds * torch_rpc::kSecToMsConversion));
  all.device_maps = options.device_maps;
  all.devices = options.devices;
  all.on_departure = std::move(on_departure);
  return with_rpc_errors([&] { return Agent::join(store, place, std::move(all)); });
}

}  // namespace

void bind_rpc(pybind11::module_& module) {
  namespace py = pybind11;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::module_::import("torch.distributed.rpc");  // registers the base classes
  py::class_<RpcOptions, torch_rpc::RpcBackendOptions, std::shared_ptr<RpcOptions>>(module, "RpcOptions")
      .def(py::init<int, float, std::string>(), py::arg("num_worker_threads"), py::arg("rpc_timeout"),
           py::arg("init_method"))
      .def_readwrite("num_worker_threads", &RpcOptions::threads)
      .def_readwrite("device_maps", &RpcOptions::device_maps)
      .def_readwrite("devices", &RpcOptions::devices);
  py::class_<Agent, torch_rpc::RpcAgent, std::shared_ptr<Agent>>(module, "RpcAgent")
      .def("stop_at_exit", &Agent::stop_at_exit, NoGil())
      .def_property_readonly("runtime", &Agent::runtime)
      .def("get_worker_info", [](const Agent& agent) { return agent.torch_rpc::RpcAgent::getWorkerInfo(); })
      .def("get_worker_info",
           static_cast<const TorchWorker& (Agent::*)(const std::string&) const>(&Agent::getWorkerInfo),
           NoGil())
      .def("get_worker_info",
           static_cast<const TorchWorker& (Agent::*)(torch_rpc::worker_id_t) const>(&Agent::getWorkerInfo),
           NoGil())
      .def("get_worker_infos", &Agent::getWorkerInfos, NoGil())
      .def(
          "gather",
          [](Agent& agent, const std::string& tag, const py::bytes& mine) {
            const std::string bytes = mine;
            std::vector<std::string> all;
            {
              const py::gil_scoped_release released;
              all = with_rpc_errors([&] { return agent.gather(tag, bytes); });
            }
            std::vector<py::bytes> result(all.begin(), all.end());
            return result;
          },
          py::arg("tag"), py::arg("mine"))
      .def("set_devices", &Agent::set_devices);
  module.def(
      "join_rpc",
      [](const c10::intrusive_ptr<c10d::Store>& store, const std::string& name, int rank, int size,
         const std::string& master_host, const RpcOptions& options, Departure on_departure) {
        const py::gil_scoped_release released;
        return join_rpc(store, {rank, size, master_host, name, true}, options, std::move(on_departure));
      },
      py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("size"), py::arg("master_host"),
      py::arg("options"), py::arg("on_departure"));
}

}  // namespace torchspan::python
