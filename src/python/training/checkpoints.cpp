// Checkpoints of Python objects: torchspan/checkpoint.py lists what each of them saves.
#include <chrono>
#include <exception>
#include <fmt/format.h>
#include <memory>
#include <optional>
#include <pybind11/stl.h>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>

#include "python/bindings.h"
#include "python/calls/python_worker.h"
#include "python/errors.h"
#include "python/gil.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

/// What Python sees of a StateReader, while an object is restored. An Error that it throws stays an Error after Python has
/// passed it on.
class Reading {
 public:
  explicit Reading(const state::StateReader& reader) : reader_(&reader) {}

  template <class F>
  auto from(F&& body) {
    try {
      if (reader_ == nullptr) throw_invalid("a checkpoint can be read while restore() runs, and not later");
      return body(*reader_);
    } catch (const Error&) {
      failure_ = std::current_exception();
      std::rethrow_exception(to_torch_error(failure_, false));
    }
  }
  void end() { reader_ = nullptr; }
  const std::exception_ptr& failure() const { return failure_; }

 private:
  const state::StateReader* reader_;
  std::exception_ptr failure_;
};

/// The text of a Python exception, as an Error that all ranks get.
Error error_of(const std::string& name, const py::error_already_set& raised) {
  const auto type = py::str(raised.type().attr("__qualname__")).cast<std::string>();
  auto text = py::str(raised.value()).cast<std::string>();
  if (constexpr std::string_view kOurs = "torchspan: "; text.starts_with(kOurs)) text.erase(0, kOurs.size());
  return {ErrorKind::kInvalid, fmt::format("'{}': {}: {}", name, type, text)};
}

/// An object of Python: `adapter.save()` lists what it saves as (name, tensor or value), or (name, shard, shape, offset);
/// `adapter.load(reader)` restores it.
class PythonSource final : public state::StateSource {
 public:
  PythonSource(std::string name, Object adapter) : name_(std::move(name)), adapter_(std::move(adapter)) {}

  void save(state::StateWriter& writer) const override {
    const py::gil_scoped_acquire gil;
    try {
      for (const py::handle item : adapter_.get().attr("save")()) add(writer, item.cast<py::tuple>());
    } catch (const py::error_already_set& raised) {
      throw error_of(name_, raised);
    }
  }
  void load(const state::StateReader& reader) override {
    const py::gil_scoped_acquire gil;
    const auto reading = std::make_shared<Reading>(reader);
    try {
      adapter_.get().attr("load")(reading);
      reading->end();
    } catch (const py::error_already_set& raised) {
      reading->end();
      if (reading->failure()) std::rethrow_exception(reading->failure());
      throw error_of(name_, raised);
    }
  }

 private:
  static void add(state::StateWriter& writer, const py::tuple& item) {
    const auto name = item[0].cast<std::string>();
    const py::object value = item[1];
    if (item.size() == 4) {
      using Sizes = std::vector<std::int64_t>;
      writer.add_shard(name, value.cast<at::Tensor>(), item[2].cast<Sizes>(), item[3].cast<Sizes>());
    } else if (THPVariable_Check(value.ptr())) {
      writer.add(name, value.cast<at::Tensor>());
    } else {
      writer.add_value(name, value.cast<state::Value>());
    }
  }

  const std::string name_;
  const Object adapter_;
};

/// Runs `body` without the GIL; an Error becomes the class of torchspan.errors for its kind.
template <class F>
auto unlocked(F&& body) {
  return with_torch_errors(
      [&] {
        const py::gil_scoped_release gil;
        return body();
      },
      false);
}

using Manager = CheckpointManager;

std::shared_ptr<Manager> make_manager(const std::shared_ptr<PythonWorker>& worker,
                                      const CheckpointOptions& options) {
  return unlocked([&]() -> std::shared_ptr<Manager> {
    if (worker == nullptr) return {new Manager(options), EndsWithInterpreter()};
    return {new Manager(worker->worker(), options), EndsWithInterpreter()};
  });
}

}  // namespace

void bind_checkpoints(py::module_& module) {
  const auto of_name = [](auto method) {
    return [method](Reading& self, const std::string& name) {
      return self.from([&](auto& reader) { return (reader.*method)(name); });
    };
  };
  py::class_<Reading, std::shared_ptr<Reading>>(module, "StateReader")
      .def("names", [](Reading& self) { return self.from([](auto& reader) { return reader.names(); }); })
      .def("has", of_name(&state::StateReader::has), py::arg("name"))
      .def("read", of_name(&state::StateReader::read), py::arg("name"))
      .def(
          "check",
          [](Reading& self, const std::string& name, const at::Tensor& target) {
            self.from([&](auto& reader) { reader.check(name, target); });
          },
          py::arg("name"), py::arg("target"))
      .def(
          "read_shard",
          [](Reading& self, const std::string& name, const at::Tensor& shard,
             const std::vector<std::int64_t>& offset) {
            self.from([&](auto& reader) { reader.read_shard_into(name, shard, offset); });
          },
          py::arg("name"), py::arg("shard"), py::arg("offset"))
      .def("shape", of_name(&state::StateReader::shape), py::arg("name"))
      .def(
          "read_part",
          [](Reading& self, const std::string& name, const std::vector<std::int64_t>& shape,
             const std::vector<std::int64_t>& offset) {
            return self.from([&](auto& reader) {
              at::Tensor part = at::empty(shape, reader.dtype_of(reader.full_name(name)));
              reader.read_shard_into(name, part, offset);
              return part;
            });
          },
          py::arg("name"), py::arg("shape"), py::arg("offset"))
      .def("value", of_name(&state::StateReader::value), py::arg("name"));
  py::class_<CheckpointOptions>(module, "CheckpointOptions")
      .def(py::init<>())
      .def_readwrite("directory", &CheckpointOptions::directory)
      .def_readwrite("keep_last", &CheckpointOptions::keep_last)
      .def_readwrite("keep_best", &CheckpointOptions::keep_best)
      .def_readwrite("lower_is_better", &CheckpointOptions::lower_is_better)
      .def_readwrite("asynchronous", &CheckpointOptions::asynchronous)
      .def_readwrite("rng", &CheckpointOptions::rng)
      .def_readwrite("participants", &CheckpointOptions::participants)
      .def_readwrite("name", &CheckpointOptions::name)
      .def_property(
          "timeout", [](const CheckpointOptions& self) { return to_seconds(self.timeout); },
          [](CheckpointOptions& self, double seconds) { self.timeout = duration_of("timeout", seconds); });
  py::class_<Manager, std::shared_ptr<Manager>>(module, "CheckpointManager")
      .def(py::init(&make_manager), py::arg("worker"), py::arg("options"))
      .def(
          "add",
          [](Manager& self, const std::string& name, py::object adapter, bool per_rank) {
            auto source = std::make_unique<PythonSource>(name, Object(std::move(adapter)));
            with_torch_errors([&] {
              if (per_rank) return self.add_source_per_rank(name, std::move(source));
              self.add_source(name, std::move(source));
            });
          },
          py::arg("name"), py::arg("adapter"), py::arg("per_rank"))
      .def(
          "save",
          [](Manager& self, std::int64_t step, std::optional<double> metric) {
            unlocked([&] { self.save(step, {.metric = metric}); });
          },
          py::arg("step"), py::arg("metric"))
      .def("wait", [](Manager& self) { unlocked([&] { self.wait(); }); })
      .def("restore", [](Manager& self) { return unlocked([&] { return self.restore(); }); });
}

}  // namespace torchspan::python
