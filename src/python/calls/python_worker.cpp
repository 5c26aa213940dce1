#include "python/calls/python_worker.h"

#include <fmt/format.h>
#include <utility>

#include <torch/csrc/jit/python/pybind_utils.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/detail/pipeline/extension.h>

#include "core/api/saturated_time.h"
#include "python/calls/raised.h"
#include "python/gil.h"

namespace torchspan::python {

namespace py = pybind11;

namespace {

/// How often a wait looks for Ctrl-C.
constexpr Duration kSignalTime = std::chrono::milliseconds(100);

/// How long a worker waits for the others when it joins, also if its calls have less time.
constexpr Duration kLeastJoinTime = std::chrono::seconds(60);

/// torch's UNSET_RPC_TIMEOUT: the worker's default.
constexpr double kUnsetTimeout = -1;

CallOptions options_of(double timeout) {
  CallOptions options;
  if (timeout != kUnsetTimeout) options.timeout = duration_of("timeout", timeout);
  return options;
}

Destination destination(const py::object& to) {
  return PyLong_Check(to.ptr()) ? Destination(to.cast<std::int64_t>()) : Destination(to.cast<std::string>());
}

py::object to_python(Packer& packer, Pack pack) { return packer.unpack(pack); }
py::object to_python(Packer& /*packer*/, c10::IValue value) {
  return torch::jit::toPyObject(std::move(value));
}

/// What a function of C++ returned, as it came.
struct TypedReply {
  std::shared_ptr<const TypedFunction> type;
  std::shared_ptr<wire::Payload> payload;
};
py::object to_python(Packer& /*packer*/, const TypedReply& reply) {
  return reply.type->decode_result(*reply.payload);
}

class TypedCompletion final : public rpc::Completion {
 public:
  TypedCompletion(std::shared_ptr<const TypedFunction> type,
                  std::weak_ptr<ContinuationExecutor> continuations)
      : type_(std::move(type)), promise_(std::move(continuations)) {}
  Future<TypedReply> future() const { return promise_.future(); }
  void succeed(wire::Payload& reply) override {
    promise_.set_value(TypedReply{type_, std::make_shared<wire::Payload>(std::move(reply))});
  }
  void fail(std::exception_ptr error) override { promise_.set_error(std::move(error)); }

 private:
  const std::shared_ptr<const TypedFunction> type_;
  Promise<TypedReply> promise_;
};

/// Waits without the GIL. Throws what a signal raises.
template <class T>
void wait_for(const Future<T>& future) {
  while (!future.done()) {
    without_gil([&] { future.wait_for(kSignalTime); });
    if (!future.done()) check_signals();
  }
}

template <class T>
class PendingOf final : public CallHandle {
 public:
  PendingOf(Future<T> future, std::shared_ptr<Packer> packer)
      : future_(std::move(future)), packer_(std::move(packer)) {}

  bool done() const override { return future_.done(); }
  py::object wait() override {
    wait_for(future_);
    if (future_.error()) raise(*packer_, future_.error());
    try {
      if constexpr (std::is_void_v<T>) {
        return py::none();
      } else {
        return to_python(*packer_, future_.wait());
      }
    } catch (const Error&) {
      raise(*packer_, std::current_exception());
    }
  }
  void on_done(py::object callback) override {
    const Object held(std::move(callback));
    future_.add_done_callback([held](const Future<T>&) {
      keep_thread_state();
      const py::gil_scoped_acquire gil;
      try {
        held.get()();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a callback of a call");
      }
    });
  }

 private:
  const Future<T> future_;
  const std::shared_ptr<Packer> packer_;
};

/// The arguments for one of the operators of that name, and its full name; nullopt if none takes them.
std::optional<std::pair<std::string, std::vector<c10::IValue>>> match_operator(const std::string& name,
                                                                               const py::tuple& args,
                                                                               const py::dict& kwargs) {
  const py::kwargs named = py::reinterpret_borrow<py::kwargs>(kwargs);
  for (const auto& candidate : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    const c10::FunctionSchema& schema = candidate->schema();
    try {
      torch::jit::Stack stack =
          torch::jit::createStackForSchema(schema, torch::jit::tuple_slice(args), named, std::nullopt);
      const std::string full =
          schema.overload_name().empty() ? name : fmt::format("{}.{}", name, schema.overload_name());
      return std::pair(full, std::move(stack));
    } catch (const torch::jit::schema_match_error&) {
    } catch (const py::cast_error&) {
    }
  }
  return std::nullopt;
}

std::shared_ptr<Packer> packer_of(const Worker& worker) {
  return worker.extension<PythonFunctions>().packer();
}

}  // namespace

void raise(Packer& packer, const std::exception_ptr& error) {
  const auto throw_object = [](const py::object& exception) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    throw py::error_already_set();
  };
  try {
    std::rethrow_exception(error);
  } catch (const PythonError& theirs) {
    std::string worker;
    try {
      std::rethrow_if_nested(theirs);
    } catch (const Error& ours) {
      if (!ours.frames().empty()) worker = ours.frames().front().worker;
    }
    Pack pack;
    pack.bytes = theirs.description;
    throw_object(packer.hooks().rebuild.get()(packer.unpack(pack), worker));
  } catch (const rpc::UserFailure& theirs) {  // of a creation, kept on the owner
    const std::exception_ptr plain = std::make_exception_ptr(Error(theirs));
    raise(packer,
          theirs.encoded() ? PythonFunctions::table().errors().rebuild(*theirs.encoded(), plain) : plain);
  } catch (const Error& ours) {
    throw_object(packer.hooks().error_type.get()(std::string(to_string(ours.kind())), ours.what()));
  }
  std::rethrow_exception(error);
}

std::shared_ptr<PythonWorker> PythonWorker::join(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const Place& place, std::shared_ptr<Packer> packer,
                                                 Options options) {
  Job job(store.get(), place, std::max<Duration>(options.timeout, kLeastJoinTime));
  return {new PythonWorker(job, store, std::move(packer), std::move(options)), EndsWithInterpreter()};
}

PythonWorker::PythonWorker(Job& job, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Packer> packer,
                           Options options)
    : store_(std::move(store)), packer_(std::move(packer)), runtime_(job.runtime()) {
  rpc::ServiceOptions service;
  service.name = job.environment().name;
  service.default_timeout = options.timeout;
  service.threads = options.threads;
  service.device_maps = std::move(options.device_maps);
  service.max_threads = std::max<std::size_t>(service.max_threads, 2 * service.threads);
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<autograd::AutogradExtension>());
  extensions.push_back(std::make_unique<pipeline::PipelineExtension>());
  extensions.push_back(std::make_unique<PythonFunctions>(packer_));
  FunctionTable functions = PythonFunctions::table();
  for (const rpc::FunctionEntry& typed : options.typed) functions.add(typed);
  service_ = job.start(std::move(service), std::move(functions), std::move(extensions));
  const rendezvous::Membership& membership = service_->membership();
  if (membership.open())
    greet_members(*worker().backend(), membership, runtime_->executor.deadline_in(kLeastJoinTime));
  observation_ = job.observe(worker().name());
}

rpc::Request PythonWorker::make_request(wire::MessageType type, const Call& call) {
  rpc::Request request;
  request.type = type;
  request.name = call.name;
  worker().backend()->apply(options_of(call.timeout), request);
  request.user_values = true;
  return request;
}

rpc::Request PythonWorker::make_python_request(wire::MessageType type, std::uint64_t function,
                                               const Call& call) {
  const Pack pack = packer_->pack_call(call.function, call.args, call.kwargs);
  rpc::Request request = make_request(type, call);
  wire::Encoder encoder(request.payload);
  wire::encode(encoder, function);
  wire::encode(encoder, pack);
  encoder.finish();
  return request;
}

std::shared_ptr<TypedFunction> PythonWorker::type_of(const py::object& function) const {
  if (!py::type::of(function).is(packer_->hooks().typed_type.get())) return nullptr;
  return function.attr("type").cast<std::shared_ptr<TypedFunction>>();
}

std::shared_ptr<CallHandle> PythonWorker::call_typed(const std::shared_ptr<TypedFunction>& type,
                                                     const Call& call) {
  if (!type->has_value()) {
    throw Error(ErrorKind::kUnsupported,
                fmt::format("a {}, the result of {}, stays on its worker: call remote()", type->result_text(),
                            type->name()));
  }
  const std::shared_ptr<rpc::WorkerBackend>& backend = worker().backend();
  const std::uint32_t to = backend->resolve(destination(call.to));
  rpc::Request request = make_typed_request(rpc::kCallFunction, *type, call);
  auto completion = std::make_shared<TypedCompletion>(type, backend->continuations());
  auto handle = std::make_shared<PendingOf<TypedReply>>(completion->future(), packer_);
  without_gil([&] { backend->send(to, std::move(request), std::move(completion)); });
  return handle;
}

rpc::Request PythonWorker::make_typed_request(wire::MessageType message, const TypedFunction& type,
                                              const Call& call) {
  rpc::Request request = make_request(message, call);
  wire::Encoder encoder(request.payload);
  wire::encode(encoder, type.id());
  type.encode_arguments(encoder, call.args);
  encoder.finish();
  return request;
}

std::shared_ptr<CallHandle> PythonWorker::call(const Call& call) {
  return with_exceptions(*packer_, [&]() -> std::shared_ptr<CallHandle> {
    if (const auto type = type_of(call.function)) return call_typed(type, call);
    const std::shared_ptr<rpc::WorkerBackend>& backend = worker().backend();
    const std::string name = packer_->hooks().pickles ? packer_->operator_of(call.function) : std::string();
    if (!name.empty()) {
      if (auto matched = match_operator(name, call.args, call.kwargs)) {
        const Destination to = destination(call.to);
        Future<c10::IValue> result;
        without_gil([&] {
          result = worker()
                       .with(options_of(call.timeout))
                       .rpc_async(to, matched->first, std::move(matched->second));
        });
        return std::make_shared<PendingOf<c10::IValue>>(std::move(result), packer_);
      }
    }
    const std::uint32_t to = backend->resolve(destination(call.to));
    rpc::Request request = make_python_request(
        rpc::kCallFunction, backend->id_of(kCall.name, &rpc::signature_of<serve_call>), call);
    auto completion = std::make_shared<rpc::PromiseCompletion<Pack>>(backend->continuations());
    auto handle = std::make_shared<PendingOf<Pack>>(completion->future(), packer_);
    without_gil([&] { backend->send(to, std::move(request), std::move(completion)); });
    return handle;
  });
}

RRef<Object> PythonWorker::create(const Call& call) {
  return with_exceptions(*packer_, [&] {
    const std::shared_ptr<rpc::WorkerBackend>& backend = worker().backend();
    const std::uint32_t to = backend->resolve(destination(call.to));
    std::string type_name = rpc::type_name_of<Object>();
    rpc::Request request;
    if (const auto type = type_of(call.function)) {
      request = make_typed_request(rpc::kCreateRemote, *type, call);
      type_name = type->result_text();
    } else {
      request = make_python_request(rpc::kCreateRemote,
                                    backend->id_of(kCreate.name, &rpc::signature_of<serve_creation>), call);
    }
    RRef<Object> reference;
    without_gil(
        [&] { reference = RRef<Object>(backend->create(to, std::move(request), std::move(type_name))); });
    return reference;
  });
}

void PythonWorker::shutdown(const std::shared_ptr<PythonWorker>& self, double timeout) {
  self->runtime_->check_process();
  const Duration limit = duration_of("timeout", timeout);
  Background leaving(self->runtime_->executor, self->worker().name() + "/shutdown",
                     [self, limit] { self->leave(limit); });
  try {
    for (bool over = false; !over; check_signals())
      without_gil([&] { over = leaving.wait_until(self->runtime_->executor.deadline_in(kSignalTime)); });
  } catch (const py::error_already_set&) {
    without_gil([&] {
      stop_before_exit(*self->runtime_, self->worker().backend(),
                       [self] { self->service_->stop("was interrupted in torchspan.rpc.shutdown()"); });
      leaving.wait_until(self->runtime_->executor.deadline_in(kSignalTime));
    });
    throw;
  }
  without_gil([&] { leaving.finish(); });  // the thread may take the GIL before it ends
}

void PythonWorker::leave(Duration limit) {
  tell_end();
  service_->shutdown(runtime_->executor.deadline_in(no_limit_if_zero(limit)));
}

void PythonWorker::stop() {
  tell_end();
  service_->stop("left without a graceful torchspan.rpc.shutdown()");
}

/// Workers that come later would look for this one until their time-out.
void PythonWorker::tell_end() {
  if (store_ == nullptr) return;
  try {
    Job::end_open_world(*store_, service_->membership());
  } catch (const std::exception& error) {  // the store ended first
    runtime_->log.debug(error.what());
  }
}

void PythonWorker::stop_at_exit() {
  if (!process_.is_current()) return;
  stop_before_exit(*runtime_, worker().backend(), [this] { stop(); });
}

std::shared_ptr<CallHandle> make_pending(Future<void> future, std::shared_ptr<Packer> packer) {
  return std::make_shared<PendingOf<void>>(std::move(future), std::move(packer));
}

/// Throws Error{kUnsupported} for references to objects of C++.
void require_value_of_python(const RRef<Object>& reference, const char* call) {
  if (reference.state()->type_tag() == wire::digest(rpc::type_name_of<Object>())) return;
  throw Error(
      ErrorKind::kUnsupported,
      fmt::format("{} of a reference to an object of C++: pass the reference to a typed() function", call));
}

py::object fetch(const RRef<Object>& reference, double timeout) {
  const Worker worker(reference.state()->backend());
  const std::shared_ptr<Packer> packer = packer_of(worker);
  return with_exceptions(*packer, [&] {
    require_value_of_python(reference, "to_here()");
    const CallOptions options = options_of(timeout);
    if (reference.is_owner()) {
      const Duration limit = options.timeout.value_or(worker.default_timeout());
      const Deadline until =
          limit == Duration::zero() ? Deadline::never() : worker.runtime().executor.deadline_in(limit);
      without_gil([&] { reference.creation().wait(until); });
      return reference.local_value().get();
    }
    Future<Pack> value;
    without_gil([&] { value = worker.with(options).call_on(reference, kFetch); });
    return PendingOf<Pack>(std::move(value), packer).wait();
  });
}

py::object local_value(const RRef<Object>& reference) {
  return with_exceptions(*packer_of(Worker(reference.state()->backend())), [&] {
    require_value_of_python(reference, "local_value()");
    const Object* value = nullptr;
    without_gil([&] { value = &reference.local_value(); });
    return value->get();
  });
}

std::shared_ptr<CallHandle> creation_of(const RRef<Object>& reference) {
  const std::shared_ptr<Packer> packer = packer_of(Worker(reference.state()->backend()));
  return with_exceptions(*packer, [&] {
    Future<void> created;
    without_gil([&] { created = reference.creation(); });
    return make_pending(std::move(created), packer);
  });
}

}  // namespace torchspan::python
