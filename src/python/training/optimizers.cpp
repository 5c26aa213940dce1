// TorchSpan's own optimizers for Python, by the names of their options in torch.optim.
#include <algorithm>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <optional>
#include <pybind11/stl.h>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/optim/algorithms.h>
#include <torchspan/optim/optimizer.h>

#include "python/bindings.h"
#include "python/calls/python_worker.h"
#include "python/errors.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

using optim::OptimizerSpec;

template <class O>
using Member = std::variant<double O::*, bool O::*, std::optional<bool> O::*>;
template <class O>
using Members = std::vector<std::pair<std::string, Member<O>>>;

/// The options of a kind, by name.
template <class O>
Members<O> members() {
  Members<O> all{{"lr", &O::lr},
                 {"maximize", &O::maximize},
                 {"float32_state", &O::float32_state},
                 {"master_weights", &O::master_weights}};
  if constexpr (requires { &O::foreach; }) all.emplace_back("foreach", &O::foreach);
  if constexpr (requires { &O::eps; }) all.emplace_back("eps", &O::eps);
  if constexpr (requires { &O::weight_decay; }) all.emplace_back("weight_decay", &O::weight_decay);
  if constexpr (requires { &O::momentum; }) all.emplace_back("momentum", &O::momentum);
  if constexpr (requires { &O::dampening; }) all.emplace_back("dampening", &O::dampening);
  if constexpr (requires { &O::nesterov; }) all.emplace_back("nesterov", &O::nesterov);
  if constexpr (requires { &O::beta1; }) {
    all.emplace_back("beta1", &O::beta1);
    all.emplace_back("beta2", &O::beta2);
  }
  if constexpr (requires { &O::amsgrad; }) all.emplace_back("amsgrad", &O::amsgrad);
  if constexpr (requires { &O::lr_decay; }) {
    all.emplace_back("lr_decay", &O::lr_decay);
    all.emplace_back("initial_accumulator_value", &O::initial_accumulator_value);
  }
  if constexpr (requires { &O::rho; }) all.emplace_back("rho", &O::rho);
  if constexpr (requires { &O::alpha; }) {
    all.emplace_back("alpha", &O::alpha);
    all.emplace_back("centered", &O::centered);
  }
  if constexpr (requires { &O::eta_minus; }) {
    all.emplace_back("eta_minus", &O::eta_minus);
    all.emplace_back("eta_plus", &O::eta_plus);
    all.emplace_back("step_min", &O::step_min);
    all.emplace_back("step_max", &O::step_max);
  }
  return all;
}

/// Sets the option; TypeError for a value of another type.
template <class O>
void set_option(O& options, const std::string& name, const Member<O>& member, py::handle value) {
  std::visit(
      [&](auto pointer) {
        using T = std::decay_t<decltype(options.*pointer)>;
        try {
          options.*pointer = value.cast<T>();
        } catch (const py::cast_error&) {
          throw py::type_error(fmt::format("{}: {} is {}; expected {}", O::kName, name,
                                           py::repr(value).template cast<std::string>(),
                                           std::is_same_v<T, double> ? "a number" : "True or False"));
        }
      },
      member);
}

struct Kind {
  OptimizerSpec spec;
  py::dict options;  ///< all of them, with their defaults
};

template <class O>
Kind kind_of(const py::dict& given) {
  O options;
  const Members<O> known = members<O>();
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto found = std::ranges::find(known, name, &std::pair<std::string, Member<O>>::first);
    if (found == known.end()) {
      std::string names;
      for (const auto& one : known) names += (names.empty() ? "" : ", ") + one.first;
      throw py::type_error(fmt::format("{} has no option '{}': it has {}", O::kName, name, names));
    }
    set_option(options, name, found->second, value);
  }
  Kind made{with_torch_errors([&] { return OptimizerSpec(options); }), {}};
  for (const auto& [name, member] : known)
    std::visit([&](auto pointer) { made.options[py::str(name)] = options.*pointer; }, member);
  return made;
}

using MakeKind = Kind (*)(const py::dict&);

/// Throws ValueError for an unknown name, and what the options' checks throw.
Kind find_kind(const std::string& name, const py::dict& options) {
  const std::map<std::string, MakeKind> kinds{{"adadelta", &kind_of<optim::Adadelta>},
                                              {"adagrad", &kind_of<optim::Adagrad>},
                                              {"adam", &kind_of<optim::Adam>},
                                              {"adamax", &kind_of<optim::Adamax>},
                                              {"adamw", &kind_of<optim::AdamW>},
                                              {"rmsprop", &kind_of<optim::RMSprop>},
                                              {"rprop", &kind_of<optim::Rprop>},
                                              {"sgd", &kind_of<optim::SGD>},
                                              {"sparseadam", &kind_of<optim::SparseAdam>}};
  const auto found = kinds.find(name);
  if (found != kinds.end()) return found->second(options);
  std::string names;
  for (const auto& [known, make] : kinds) names += (names.empty() ? "" : ", ") + known;
  throw py::value_error(
      fmt::format("torchspan.optim: there is no optimizer '{}': there are {}, and the classes of torch.optim",
                  name, names));
}

/// Parameters of this worker with their names, and the optimizer that they share.
using Group = std::tuple<std::string, py::dict, std::vector<at::Tensor>, std::vector<std::string>>;

std::unique_ptr<optim::Optimizer> make_optimizer(const std::vector<Group>& groups) {
  std::vector<optim::ParamGroup> made;
  for (const auto& [kind, options, parameters, names] : groups)
    made.emplace_back(parameters, find_kind(kind, options).spec, names);
  return with_torch_errors([&] { return std::make_unique<optim::Optimizer>(std::move(made)); });
}

/// Steps by the context's gradients times `factor`, without the GIL.
void step(optim::Optimizer& optimizer, PythonWorker& worker, std::uint64_t context, double factor) {
  released(worker, [&] {
    const auto view = worker.worker().extension<autograd::AutogradExtension>().find(context);
    std::unordered_map<const c10::TensorImpl*, at::Tensor> gradients;
    for (const autograd::ParameterGradient& one : view.gradients())
      gradients.emplace(one.parameter.unsafeGetTensorImpl(), one.gradient);
    optimizer.step([&](const at::Tensor& parameter) -> at::Tensor {
      const auto found = gradients.find(parameter.unsafeGetTensorImpl());
      if (found == gradients.end() || factor == 1)
        return found == gradients.end() ? at::Tensor() : found->second;
      return found->second * factor;
    });
  });
}

using Entries = optim::StateDict::Entries;

Entries state_of(const optim::Optimizer& optimizer, bool copied) {
  Entries entries;
  for (const auto& one : copied ? optimizer.state_dict() : optimizer.state_view())
    entries.emplace_back(one.key(), one.value());
  return entries;
}

}  // namespace

void bind_optimizers(py::module_& module) {
  module.def(
      "optimizer_options",
      [](const std::string& kind, const py::dict& given) { return find_kind(kind, given).options; },
      py::arg("kind"), py::arg("given"));
  module.def(
      "gradient_norm",
      [](const std::vector<at::Tensor>& gradients, double norm_type) {
        return with_torch_errors([&] { return optim::gradient_norm(gradients, norm_type); });
      },
      py::arg("gradients"), py::arg("norm_type"), py::call_guard<py::gil_scoped_release>());
  py::class_<optim::Optimizer>(module, "Optimizer")
      .def(py::init(&make_optimizer), py::arg("groups"))
      .def(
          "step",
          [](optim::Optimizer& self, const std::shared_ptr<PythonWorker>& worker, std::uint64_t context,
             double factor) { step(self, *worker, context, factor); },
          py::arg("worker"), py::arg("context"), py::arg("factor"))
      .def_property("lrs", &optim::Optimizer::lrs,
                    [](optim::Optimizer& self, const std::vector<double>& rates) {
                      with_torch_errors([&] { self.set_lrs(rates); });
                    })
      .def("state", &state_of, py::arg("copied"))
      .def(
          "load_state",
          [](optim::Optimizer& self, Entries entries) {
            with_torch_errors([&] { self.load_state_dict(optim::StateDict(std::move(entries))); });
          },
          py::arg("entries"));
}

}  // namespace torchspan::python
