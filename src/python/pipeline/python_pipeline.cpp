#include <fmt/format.h>
#include <map>
#include <optional>
#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/nn/module.h>

#include <torchspan/core/error.h>
#include <torchspan/pipeline.h>
#include <torchspan/pipeline/deferred_batch_norm.h>
#include <torchspan/schedule.h>

#include "python/bindings.h"
#include "python/calls/python_worker.h"
#include "python/calls/raised.h"
#include "python/errors.h"
#include "python/gil.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

using pipeline::Batch;

/// Appends a value of Python. `unsplit`: the type torchspan.pipeline.Unsplit.
void append(Batch& batch, py::handle value, const Object& unsplit) {
  py::object held;
  if (py::isinstance(value, unsplit.get())) {
    batch.mark_unsplit(batch.size());
    held = value.attr("tensor");
    value = held;
  }
  PyObject* const object = value.ptr();
  if (THPVariable_Check(object)) {
    batch.members.emplace_back(THPVariable_Unpack(object));
  } else if (object == Py_None) {
    batch.members.emplace_back();
  } else if (PyBool_Check(object)) {
    batch.members.emplace_back(object == Py_True);
  } else if (PyLong_Check(object)) {
    const long long number = PyLong_AsLongLong(object);
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    batch.members.emplace_back(static_cast<std::int64_t>(number));
  } else if (PyFloat_Check(object)) {
    batch.members.emplace_back(PyFloat_AS_DOUBLE(object));
  } else {
    throw py::type_error(fmt::format(
        "torchspan: a value of type {} cannot go from layer to layer: use a tensor, or a tuple of tensors, "
        "numbers, bools and None",
        py::str(py::type::of(value).attr("__qualname__")).cast<std::string>()));
  }
}

Batch to_batch(py::handle value, const Object& unsplit) {
  Batch batch;
  batch.tuple = PyTuple_Check(value.ptr()) || PyList_Check(value.ptr());
  if (!batch.tuple) {
    append(batch, value, unsplit);
    return batch;
  }
  for (const py::handle member : value) append(batch, member, unsplit);
  return batch;
}

/// What a caller passes: None is nothing, on workers that read nothing.
Batch batch_of_caller(py::handle value, const Object& unsplit) {
  return value.is_none() ? Batch() : to_batch(value, unsplit);
}

/// A tensor, a tuple, or None for an empty batch.
py::object to_python(const Batch& batch) {
  if (!batch.tuple) return batch.size() == 0 ? py::none() : torch::jit::toPyObject(batch.members.front());
  py::tuple all(batch.size());
  for (std::size_t i = 0; i < batch.size(); ++i) all[i] = torch::jit::toPyObject(batch.members[i]);
  return std::move(all);
}

/// Skip connections of a layer as its forward sees them, while it runs.
class PythonSkips {
 public:
  explicit PythonSkips(pipeline::Skips& skips) : skips_(&skips) {}

  void stash(const std::string& name, std::optional<at::Tensor> value) {
    with_torch_errors([&] { open().stash(name, value.value_or(at::Tensor())); }, false);
  }
  std::optional<at::Tensor> pop(const std::string& name) {
    at::Tensor value = with_torch_errors([&] { return open().pop(name); }, false);
    return value.defined() ? std::optional(std::move(value)) : std::nullopt;
  }
  void end() { skips_ = nullptr; }

 private:
  pipeline::Skips& open() {
    if (skips_ == nullptr) throw_invalid("skips belong to one forward: stash and pop while it runs");
    return *skips_;
  }
  pipeline::Skips* skips_;
};

/// A layer's part of a cache as its forward sees it, while it runs.
class PythonCache {
 public:
  explicit PythonCache(pipeline::LayerCache cache) : cache_(cache) {}

  bool active() const { return cache_.active(); }
  std::vector<at::Tensor>& tensors() {
    return *with_torch_errors(
        [this] {
          if (cache_.active()) return &cache_.tensors();
          throw_invalid(
              "the cache of a layer is not active: use it while the layer's forward runs, in infer(x, "
              "cache); see LayerCache.active");
        },
        false);
  }
  void end() { cache_ = {}; }

 private:
  pipeline::LayerCache cache_;
};

/// What the forward of a use takes besides its input.
struct Takes {
  bool skips = false, cache = false;
};

/// A layer on its owner. Has the parameters and buffers of a module of Python, under the same names. Always in evaluation
/// mode, whatever mode the module has: the module keeps its buffers itself when a forward is repeated.
class PythonLayer final : public torch::nn::Module {
 public:
  /// `layer`: a _Layer of torchspan/pipeline.py. With the GIL.
  PythonLayer(const py::object& layer, std::shared_ptr<Raised> raised, Object unsplit)
      : layer_(layer),
        run_(layer.attr("run")),
        raised_(std::move(raised)),
        unsplit_(std::move(unsplit)),
        has_module_(!layer.attr("module").is_none()) {
    if (has_module_) {
      add(*this, layer.attr("module"));
      // The pipeline finds what gathers statistics among the modules of a layer. They have no parameters of their own.
      for (const py::handle norm : layer.attr("statistics")) {
        std::string name = fmt::format("statistics_{}", children().size());
        while (named_children().contains(name)) name += '_';
        register_module(std::move(name), norm.cast<std::shared_ptr<pipeline::DeferredBatchNormImpl>>());
      }
    }
    known_.clear();
    torch::nn::Module::train(false);
  }

  void train(bool on) override {
    raised_->guard([&] { layer_.get().attr("module").attr("train")(on); });
  }
  /// Null `method`: the layer itself.
  Batch call(const Object& method, Takes takes, const Batch& input, const pipeline::LayerContext& context) {
    return raised_->guard([&] {
      py::tuple arguments(2 + input.size());
      arguments[0] = method ? method.get() : py::none();
      arguments[1] = py::bool_(context.repeated);
      for (std::size_t i = 0; i < input.size(); ++i)
        arguments[2 + i] = torch::jit::toPyObject(input.members[i]);
      if (!takes.skips && !takes.cache) return to_batch(run_.get()(*arguments), unsplit_);
      py::dict named;
      const Given<PythonSkips> skips(context.skips);
      const Given<PythonCache> cache(context.cache);
      if (takes.skips) named["skips"] = skips.value;
      if (takes.cache) named["cache"] = cache.value;
      return to_batch(run_.get()(*arguments, **named), unsplit_);
    });
  }
  bool has_module() const { return has_module_; }
  py::object layer() const { return layer_.get(); }

 private:
  /// Something for a forward, which cannot be used after it.
  template <class T>
  struct Given {
    template <class U>
    explicit Given(U& of) : value(std::make_shared<T>(of)) {}
    ~Given() { value->end(); }
    Given(const Given&) = delete;
    const std::shared_ptr<T> value;
  };

  void add(torch::nn::Module& into, const py::object& module) {
    const auto each = [&](const char* kind, const auto& body) {
      const py::dict members = module.attr(kind);
      for (const auto& [name, member] : members) {
        if (!member.is_none())
          body(py::str(name).cast<std::string>(), py::reinterpret_borrow<py::object>(member));
      }
    };
    each("_parameters", [&](const std::string& name, const py::object& member) {
      const at::Tensor& tensor = THPVariable_Unpack(member.ptr());
      into.register_parameter(name, tensor, tensor.requires_grad());
    });
    each("_buffers", [&](const std::string& name, const py::object& member) {
      into.register_buffer(name, THPVariable_Unpack(member.ptr()));
    });
    each("_modules", [&](const std::string& name, const py::object& member) {
      std::shared_ptr<torch::nn::Module>& part = known_[member.ptr()];
      const bool is_new = part == nullptr;
      if (is_new) part = std::make_shared<torch::nn::Module>();
      const std::shared_ptr<torch::nn::Module> here = part;
      if (is_new) add(*here, member);
      into.register_module(name, here);
    });
  }

  const Object layer_;
  const Object run_;
  const std::shared_ptr<Raised> raised_;
  const Object unsplit_;
  const bool has_module_;
  std::map<PyObject*, std::shared_ptr<torch::nn::Module>> known_;  ///< while it is constructed
};

pipeline::LayerSpec spec_of(const py::tuple& layer, const std::shared_ptr<Raised>& raised,
                            const Object& unsplit) {
  pipeline::LayerSpec spec;
  spec.name = layer[0].cast<std::string>();
  spec.build = [build = Object(layer[1]), raised, unsplit] {
    return raised->guard([&] {
      const auto made = std::make_shared<PythonLayer>(build.get()(), raised, unsplit);
      return pipeline::BuiltLayer{made, made->has_module() ? made : nullptr};
    });
  };
  spec.existing = [tensors = layer[2].cast<std::vector<at::Tensor>>()] { return tensors; };
  return spec;
}

pipeline::LayerCall call_of(const py::object& method, Takes takes) {
  return [name = method.is_none() ? Object() : Object(method), takes](void* object, const Batch& input,
                                                                      const pipeline::LayerContext& context) {
    return static_cast<PythonLayer*>(object)->call(name, takes, input, context);
  };
}

/// `layers`: tuples (name, build, existing tensors); `uses`: (layer, method or None, stashes, pops, space, has a cache);
/// `ties`: lists of (layer, parameter). `raised` keeps what the layers raise.
pipeline::Layers describe(const py::list& layers, const py::list& uses, const py::list& ties,
                          const std::shared_ptr<Raised>& raised, const Object& unsplit) {
  pipeline::Layers described;
  std::vector<pipeline::Use<void>> firsts;
  std::vector<bool> used(layers.size(), false);
  for (const py::handle each : uses) {
    const auto use = each.cast<py::tuple>();
    const auto layer = use[0].cast<std::size_t>();
    const auto stashes = use[2].cast<std::vector<std::string>>(),
               pops = use[3].cast<std::vector<std::string>>();
    const Takes takes{.skips = !stashes.empty() || !pops.empty(), .cache = use[5].cast<bool>()};
    const auto add = [&] {
      if (!used[layer]) {  // layers are numbered in the order of their first uses
        firsts.push_back(described.add(spec_of(layers[layer].cast<py::tuple>(), raised, unsplit),
                                       call_of(py::none(), takes)));
        used[layer] = true;
        return firsts.back();
      }
      const std::string method = use[1].is_none() ? std::string() : use[1].cast<std::string>();
      return described.reuse(firsts[layer], method, call_of(use[1], takes));
    };
    pipeline::Use<void> added = add();
    for (const std::string& name : stashes) added.stashes(name);
    for (const std::string& name : pops) added.pops(name);
    added.in_space(use[4].cast<std::string>());
  }
  for (const py::handle tie : ties) {
    std::vector<pipeline::TiedParameter> tied;
    for (const py::handle each : tie) {
      const auto parameter = each.cast<py::tuple>();
      tied.emplace_back(firsts.at(parameter[0].cast<std::size_t>()), parameter[1].cast<std::string>());
    }
    described.tie(std::move(tied));
  }
  return described;
}

using OwnTensors = std::vector<std::optional<at::Tensor>>;

/// `own`: weight, bias, running_mean, running_var and num_batches_tracked of Python's module, which may replace them.
void set_own(pipeline::DeferredBatchNormImpl& norm, const OwnTensors& own) {
  auto next = own.begin();
  for (at::Tensor* tensor :
       {&norm.weight, &norm.bias, &norm.running_mean, &norm.running_var, &norm.num_batches_tracked})
    *tensor = (next++)->value_or(at::Tensor());
}

/// The C++ side of a DeferredBatchNorm of Python.
at::Tensor normalize(pipeline::DeferredBatchNormImpl& norm, const at::Tensor& input, bool training,
                     const OwnTensors& own) {
  return with_torch_errors([&] {
    const py::gil_scoped_release no_gil;
    set_own(norm, own);
    norm.train(training);
    return norm.forward(input);
  });
}

std::shared_ptr<pipeline::DeferredBatchNormImpl> make_norm(std::int64_t channels, double eps,
                                                           std::optional<double> momentum,
                                                           const OwnTensors& own) {
  const auto options = torch::nn::BatchNormOptions(channels).eps(eps).momentum(momentum);
  auto norm =
      std::make_shared<pipeline::DeferredBatchNormImpl>(options, pipeline::DeferredBatchNormImpl::State());
  set_own(*norm, own);
  return norm;
}

py::object unsplit_type() { return py::module_::import("torchspan.pipeline").attr("Unsplit"); }

/// A pipeline of layers of Python, used by one thread at a time. With the GIL.
class PythonPipeline {
 public:
  /// `layers`, `uses`, `ties`: as describe() takes them. Collective.
  PythonPipeline(std::shared_ptr<PythonWorker> worker, const py::list& layers, const py::list& uses,
                 const py::list& ties, const py::dict& options)
      : worker_(std::move(worker)),
        raised_(std::make_shared<Raised>(worker_->packer())),
        unsplit_(unsplit_type()) {
    const pipeline::Layers described = describe(layers, uses, ties, raised_, unsplit_);
    pipeline::PipelineOptions chosen = options_of(options);
    raised_->released([&] {
      pipeline_ = std::make_unique<pipeline::Pipeline>(worker_->worker(), described, std::move(chosen));
    });
  }

  /// Throws if it was closed.
  pipeline::Pipeline& open() {
    if (pipeline_) return *pipeline_;
    raise(*worker_->packer(),
          std::make_exception_ptr(Error(ErrorKind::kInvalid, "the pipeline was closed: make another one")));
  }
  /// Runs `body` with the pipeline, without the GIL.
  template <class F>
  auto run(F&& body) {
    pipeline::Pipeline& all = open();
    require_idle();
    struct Busy {
      explicit Busy(bool& flag) : flag(flag) { flag = true; }
      ~Busy() { flag = false; }
      Busy(const Busy&) = delete;
      bool& flag;
    };
    const Busy busy(busy_);
    return raised_->released([&] { return body(all); });
  }

  double train_step(const py::object& input, const py::object& target, const py::object& loss,
                    double gradient_scale, bool no_sync) {
    const Batch x = batch_of_caller(input, unsplit_), y = batch_of_caller(target, unsplit_);
    pipeline::StepOptions options;
    options.gradient_scale = gradient_scale;
    options.no_sync = no_sync;
    return run([&, function = loss_of(loss)](pipeline::Pipeline& all) {
      return all.train_step(x, y, function, options);
    });
  }
  py::object infer(const py::object& input, const std::shared_ptr<pipeline::Cache>& cache) {
    const Batch x = batch_of_caller(input, unsplit_);
    return to_python(
        run([&](pipeline::Pipeline& all) { return cache ? all.infer(x, *cache) : all.infer(x); }));
  }
  py::object forward(const py::object& input) {
    const Batch x = batch_of_caller(input, unsplit_);
    return to_python(run([&](pipeline::Pipeline& all) { return all.forward(x); }));
  }
  void backward(const std::vector<std::optional<at::Tensor>>& gradients) {
    std::vector<at::Tensor> given;
    for (const auto& gradient : gradients) given.push_back(gradient.value_or(at::Tensor()));
    run([&](pipeline::Pipeline& all) { all.backward(given); });
  }
  /// The layers of this worker that have modules, by number.
  py::dict layers() {
    py::dict found;
    const pipeline::Pipeline& all = open();
    for (int layer = 0; layer < static_cast<int>(all.plan().layers.size()); ++layer) {
      if (const auto* here = dynamic_cast<const PythonLayer*>(all.module(layer).get()))
        found[py::int_(layer)] = here->layer();
    }
    return found;
  }
  /// (step, micro-batches, seconds, by worker: its actions, idle seconds, the most micro-batches that it held)
  py::tuple last_step() {
    const pipeline::StepReport& report = open().last_step();
    const schedule::Timeline& measured = report.measured;
    py::dict workers;
    for (std::size_t worker = 0; worker < measured.spans.size(); ++worker) {
      py::list actions;
      for (const schedule::ActionSpan& span : measured.spans[worker])
        actions.append(
            py::make_tuple(schedule::to_string(span.action), to_seconds(span.start), to_seconds(span.end)));
      workers[py::str(open().plan().workers[worker])] =
          py::make_tuple(std::move(actions), to_seconds(measured.idle[worker]), measured.peak_live[worker]);
    }
    return py::make_tuple(report.step, report.micro_batches, to_seconds(measured.makespan), workers);
  }
  std::string schedule_csv() {
    return raised_->released(
        [all = &open()] { return schedule::to_csv(schedule::to_sheet(all->last_step().table)); });
  }
  void close() {
    require_idle();
    without_gil([this] { pipeline_ = nullptr; });
  }

 private:
  void require_idle() const {
    if (!busy_) return;
    raise(*worker_->packer(), std::make_exception_ptr(Error(
                                  ErrorKind::kInvalid,
                                  "the pipeline runs a call of another thread, or one that called this: "
                                  "call it from one thread, and not from its layers")));
  }
  pipeline::Loss loss_of(const py::object& loss) {
    return [function = Object(loss), raised = raised_](const Batch& output, const Batch& target) {
      return raised->guard([&] {
        const py::object value = function.get()(to_python(output), to_python(target));
        if (!THPVariable_Check(value.ptr())) {
          throw py::type_error(fmt::format(
              "torchspan: the loss function returned a value of type {}: return a tensor of one element, the "
              "mean over the rows",
              py::str(py::type::of(value).attr("__qualname__")).cast<std::string>()));
        }
        return at::Tensor(THPVariable_Unpack(value.ptr()));
      });
    };
  }
  pipeline::PipelineOptions options_of(const py::dict& given) {
    pipeline::PipelineOptions options;
    options.balance = given["balance"].cast<std::vector<int>>();
    options.workers = given["workers"].cast<std::vector<std::string>>();
    options.replicas = given["replicas"].cast<int>();
    options.micro_batches = given["micro_batches"].cast<int>();
    options.schedule = static_cast<pipeline::Schedule>(given["schedule"].cast<int>());
    if (const auto csv = given["schedule_csv"].cast<std::optional<std::string>>()) {
      options.schedule = pipeline::Schedule::kCustom;
      options.custom_schedule = [text = *csv](const schedule::Placement&) {
        return schedule::to_table(schedule::parse_csv(text), "schedule_csv");
      };
    }
    options.checkpoint = static_cast<pipeline::ActivationCheckpoint>(given["checkpoint"].cast<int>());
    options.checkpoint_layers = given["checkpoint_layers"].cast<std::vector<int>>();
    options.staleness = given["staleness"].cast<int>();
    options.offload = given["offload"].cast<bool>();
    options.max_in_flight = given["max_in_flight"].cast<int>();
    options.seed = given["seed"].cast<std::optional<std::uint64_t>>();
    options.stall_timeout = duration_of("timeout", given["timeout"].cast<double>());
    options.name = given["name"].cast<std::string>();
    options.while_waiting = [raised = raised_] { raised->guard(check_signals); };
    return options;
  }

  const std::shared_ptr<PythonWorker> worker_;
  const std::shared_ptr<Raised> raised_;
  const Object unsplit_;
  bool busy_ = false;  ///< a call runs
  std::unique_ptr<pipeline::Pipeline> pipeline_;
};

/// By time, or by memory with a `parameter_scale` above 0.
std::vector<int> balance(const std::shared_ptr<PythonWorker>& worker, const py::list& layers,
                         const py::list& uses, const py::list& ties, int stages, const py::object& sample,
                         double parameter_scale, int repeats, std::vector<std::string> workers) {
  const auto raised = std::make_shared<Raised>(worker->packer());
  const Object unsplit(unsplit_type());
  const pipeline::Layers described = describe(layers, uses, ties, raised, unsplit);
  const Batch x = batch_of_caller(sample, unsplit);
  const pipeline::ProfileOptions options{.repeats = repeats, .workers = std::move(workers)};
  return raised->released([&] {
    if (parameter_scale > 0)
      return pipeline::balance_by_size(worker->worker(), described, stages, x, parameter_scale, options);
    return pipeline::balance_by_time(worker->worker(), described, stages, x, options);
  });
}

}  // namespace

void bind_pipeline(py::module_& module) {
  using Self = PythonPipeline&;
  py::class_<PythonSkips, std::shared_ptr<PythonSkips>>(module, "Skips")
      .def("stash", &PythonSkips::stash, py::arg("name"), py::arg("value"))
      .def("pop", &PythonSkips::pop, py::arg("name"));
  py::class_<PythonCache, std::shared_ptr<PythonCache>>(module, "LayerCache")
      .def_property_readonly("active", &PythonCache::active)
      .def_property(
          "tensors", [](PythonCache& self) { return self.tensors(); },
          [](PythonCache& self, std::vector<at::Tensor> tensors) { self.tensors() = std::move(tensors); });
  py::class_<pipeline::Cache, std::shared_ptr<pipeline::Cache>>(module, "PipelineCache").def(py::init<>());
  py::class_<pipeline::DeferredBatchNormImpl, std::shared_ptr<pipeline::DeferredBatchNormImpl>>(
      module, "DeferredBatchNorm")
      .def(py::init(&make_norm), py::arg("channels"), py::arg("eps"), py::arg("momentum"), py::arg("own"))
      .def("forward", &normalize, py::arg("input"), py::arg("training"), py::arg("own"));
  module.def("balance", &balance, py::arg("worker"), py::arg("layers"), py::arg("uses"), py::arg("ties"),
             py::arg("stages"), py::arg("sample"), py::arg("parameter_scale"), py::arg("repeats"),
             py::arg("workers"));
  py::class_<PythonPipeline, std::shared_ptr<PythonPipeline>>(module, "Pipeline")
      .def(py::init([](std::shared_ptr<PythonWorker> worker, const py::list& layers, const py::list& uses,
                       const py::list& ties, const py::dict& options) {
             return std::shared_ptr<PythonPipeline>(
                 new PythonPipeline(std::move(worker), layers, uses, ties, options), EndsWithInterpreter());
           }),
           py::arg("worker"), py::arg("layers"), py::arg("uses"), py::arg("ties"), py::arg("options"))
      .def("train_step", &PythonPipeline::train_step, py::arg("x"), py::arg("y"), py::arg("loss"),
           py::arg("gradient_scale"), py::arg("no_sync"))
      .def("finish", [](Self self) { return self.run([](pipeline::Pipeline& all) { return all.finish(); }); })
      .def("infer", &PythonPipeline::infer, py::arg("x"), py::arg("cache"))
      .def("forward", &PythonPipeline::forward, py::arg("x"))
      .def("backward", &PythonPipeline::backward, py::arg("gradients"))
      .def(
          "train", [](Self self, bool on) { self.run([&](pipeline::Pipeline& all) { all.train(on); }); },
          py::arg("on"))
      .def(
          "clip_grad_norm",
          [](Self self, double max_norm, double norm_type) {
            return self.run([&](pipeline::Pipeline& all) { return all.clip_grad_norm(max_norm, norm_type); });
          },
          py::arg("max_norm"), py::arg("norm_type"))
      .def("parameters", [](Self self) { return self.open().parameters(); })
      .def("parameter_names", [](Self self) { return self.open().parameter_names(); })
      .def("layers", &PythonPipeline::layers)
      .def("plan", [](Self self) { return pipeline::to_text(self.open().plan()); })
      .def("plan_svg", [](Self self) { return pipeline::to_svg(self.open().plan()); })
      .def("replica", [](Self self) { return self.open().replica(); })
      .def("last_step", &PythonPipeline::last_step)
      .def("schedule_csv", &PythonPipeline::schedule_csv)
      .def_property(
          "training_steps", [](Self self) { return self.open().training_steps(); },
          [](Self self, std::uint64_t steps) { self.open().set_training_steps(steps); })
      .def("close", &PythonPipeline::close);
  module.def("seed_of_layer", &pipeline::seed_of_layer, py::arg("seed"), py::arg("layer"));
  module.def("seed_of_use", &pipeline::seed_of_use, py::arg("seed"), py::arg("step"), py::arg("order"),
             py::arg("micro_batch"));
}

}  // namespace torchspan::python
