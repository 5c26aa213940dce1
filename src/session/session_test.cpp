// A session in this process, and the objects that outlive it.
#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdlib.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/optim.h>
#include <torchspan/pipeline.h>
#include <torchspan/rpc/remote_module.h>
#include <torchspan/session.h>

#include "core/api/trace_format.h"

namespace torchspan::session_test {
namespace {

using ::testing::HasSubstr;

struct OutlivingImpl : torch::nn::Module {
  OutlivingImpl() { linear = register_module("linear", torch::nn::Linear(2, 2)); }
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Outliving);

at::Tensor twice(const at::Tensor& x) { return x + x; }
/// Ends the session that serves this call, on one of the session's own threads.
void end_session(std::int64_t session, std::int64_t ended) {
  reinterpret_cast<std::unique_ptr<Session>*>(session)->reset();
  reinterpret_cast<std::atomic<bool>*>(ended)->store(true);
}
constexpr ModuleClass<Outliving> kModule{"Outliving"};
constexpr Function<twice> kTwice{"twice"};
constexpr Function<end_session> kEndSession{"end_session"};

FunctionTable functions() { return FunctionTable().add(kModule, kTwice, kEndSession); }
at::Tensor input() { return torch::ones({2, 2}); }

void expect_cancelled(const char* verb, const std::function<void()>& use) {
  SCOPED_TRACE(verb);
  try {
    use();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
    EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("keep the Session for as long as anything uses its "
                                                         "worker"),
                                               HasSubstr("cannot be used any more")));
  }
}

/// Members in the wrong order, static objects, threads that end late: each handle used to read the memory of
/// a destroyed session.
void expect_handles_outlive_it(bool shut_down) {
  auto session = std::make_unique<Session>(WorkerOptions{}, functions());
  const Worker worker = session->worker();
  const RemoteModule module(worker, 0, kModule);
  const RRef<at::Tensor> mine(worker, input().requires_grad_());
  optim::DistributedOptimizer optimizer(*session, optim::SGD{.lr = 0.1}, {module, mine});
  optim::LRScheduler schedule(optimizer, optim::StepLR{.step_size = 1});
  pipeline::Layers layers;
  layers.add<torch::nn::Linear>(2, 2);
  pipeline::Pipeline pipe(worker, layers, {});
  autograd::Context context(*session);
  const at::Tensor loss = (module.forward(input()) * mine.local_value()).sum();
  context.backward(loss, {.retain_graph = true});
  optimizer.step(context);
  const auto pending = worker.rpc_async(0, kTwice, input());
  pending.wait();
  if (shut_down) session->shutdown();
  session.reset();

  expect_cancelled("rpc_sync", [&] { worker.rpc_sync(0, kTwice, input()); });
  expect_cancelled("with",
                   [&] { worker.with({.timeout = std::chrono::seconds(1)}).rpc_sync(0, kTwice, input()); });
  expect_cancelled("remote", [&] { worker.remote(0, kTwice, input()).to_here(); });
  expect_cancelled("barrier", [&] { worker.barrier(); });
  expect_cancelled("forward", [&] { module.forward(input()); });
  expect_cancelled("to_here", [&] { mine.to_here(); });
  expect_cancelled("backward", [&] { context.backward(loss); });
  expect_cancelled("step", [&] { optimizer.step(context); });
  expect_cancelled("state_dict", [&] { optimizer.state_dict(); });
  expect_cancelled("an optimizer", [&] { optim::DistributedOptimizer(worker, optim::SGD{.lr = 1}, {mine}); });
  schedule.step();
  pipe.eval();
  EXPECT_EQ(pipe.parameters().size(), 2u);
  EXPECT_TRUE(pending.wait().equal(input() * 2));
  EXPECT_THAT(module.str(), HasSubstr("RRef(value"));
  EXPECT_TRUE(mine.local_value().defined());
  worker.runtime().log.debug("the log of a worker lives as long as the worker's handles");
}

TEST(Session, MayEndBeforeObjectsThatUseItsWorker) { expect_handles_outlive_it(false); }
TEST(Session, MayBeShutDownBeforeObjectsThatUseItsWorkerEnd) { expect_handles_outlive_it(true); }

TEST(Session, TakesAnOptimizerTableInPlaceOfItsOwn) {
  using TorchSGD = optim::FromTorch<torch::optim::SGD, torch::optim::SGDOptions, "torch.SGD">;
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<optim::OptimExtension>(optim::OptimizerTable().add<TorchSGD>()));
  Session session(WorkerOptions{}, functions(), std::move(extensions));
  const RRef<at::Tensor> mine(session.worker(), input().requires_grad_());
  optim::DistributedOptimizer optimizer(session, TorchSGD{torch::optim::SGDOptions(0.5)}, {mine});
  autograd::Context context(session);
  context.backward(mine.local_value().sum());
  optimizer.step(context);
  EXPECT_TRUE(mine.local_value().equal(input() - 0.5));
}

/// A thread cannot wait for itself: that used to end the process through an exception from a destructor.
TEST(Session, OfNamedExtensionsHasNoOthers) {
  auto session = Session::with<optim::OptimExtension>(WorkerOptions{}, functions());
  const RRef<at::Tensor> weight(session.worker(), input().requires_grad_());
  optim::DistributedOptimizer optimizer(session, optim::SGD{.lr = 0.5}, {weight});
  {
    autograd::Context context(session);
    context.backward(weight.local_value().sum());
    optimizer.step(context);
  }
  EXPECT_TRUE(weight.local_value().eq(0.5).all().item<bool>());
  pipeline::Layers layers;
  layers.add<torch::nn::Linear>(2, 2);
  try {
    const pipeline::Pipeline pipe(session.worker(), layers, {});
    ADD_FAILURE() << "the session has the extension of pipelines";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("PipelineExtension"));
  }
}

TEST(Session, MayEndOnItsOwnThread) {
  std::atomic<bool> ended{false};
  auto session = std::make_unique<Session>(WorkerOptions{}, functions());
  const Worker worker = session->worker();
  ::testing::internal::CaptureStderr();
  EXPECT_THROW(worker.rpc_sync(0, kEndSession, reinterpret_cast<std::int64_t>(&session),
                               reinterpret_cast<std::int64_t>(&ended)),
               Error);
  while (!ended.load()) worker.runtime().executor.sleep(std::chrono::milliseconds(1));
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("destroy the object on a thread that the program started"));
  expect_cancelled("rpc_sync", [&] { worker.rpc_sync(0, kTwice, input()); });
}

TEST(Session, WritesATraceOfItsCallsAndOfTheProgramsOwnParts) {
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_sessionXXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  WorkerOptions options;
  options.observation.trace_folder = folder;
  {
    Session session(options, functions());
    const Span span(session, "step", 17);
    session.worker().rpc_sync(0, kTwice, input());
    log_scalar(session, "loss", 0.5);
    session.shutdown();
  }
  std::ifstream file(std::filesystem::directory_iterator(folder)->path(), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  const TraceContents trace = decode_trace(std::as_bytes(std::span(bytes)));
  std::filesystem::remove_all(folder);
  EXPECT_TRUE(trace.complete);
  const auto find = [&](SpanKind kind, const std::string& wanted) {
    const auto found = std::find_if(trace.spans.begin(), trace.spans.end(), [&](const StoredSpan& span) {
      return span.kind == kind && trace.names[span.name] == wanted;
    });
    EXPECT_NE(found, trace.spans.end()) << wanted;
    return found == trace.spans.end() ? StoredSpan() : *found;
  };
  const StoredSpan call = find(SpanKind::kCall, "twice"), handler = find(SpanKind::kHandler, "twice");
  EXPECT_EQ(call.link.id, handler.link.id);
  EXPECT_EQ(call.link.peer, 0);
  EXPECT_EQ(handler.link.peer, 0);
  EXPECT_GT(call.link.bytes, 16u);
  EXPECT_LE(call.begin, handler.begin);
  EXPECT_GE(call.end, handler.end);
  EXPECT_EQ(find(SpanKind::kUser, "step").link.id, 17u);
  ASSERT_EQ(trace.scalars.size(), 1u);
  EXPECT_EQ(trace.scalars[0].value, 0.5);
}

/// Sets a variable of this process to an empty text until its end.
struct EmptyVariable {
  explicit EmptyVariable(const char* name) : name(name) { setenv(name, "", 1); }
  ~EmptyVariable() { unsetenv(name); }
  const char* const name;
};

TEST(Session, TakesEmptyVariablesAsNotSet) {
  const EmptyVariable empty[] = {EmptyVariable("TORCHSPAN_NETWORK"), EmptyVariable("TORCHSPAN_PORT_RANGE"),
                                 EmptyVariable("TORCHSPAN_LOG_LEVEL"),
                                 EmptyVariable("TORCHSPAN_RPC_TIMEOUT")};
  const WorkerOptions options = WorkerOptions::from_env();
  const WorkerOptions defaults{};
  EXPECT_EQ(options.log_level, defaults.log_level);
  EXPECT_EQ(options.network.tls.ports.first, defaults.network.tls.ports.first);
  EXPECT_EQ(options.network.tls.network, defaults.network.tls.network);
  EXPECT_EQ(options.rpc_timeout, defaults.rpc_timeout);
}

}  // namespace
}  // namespace torchspan::session_test
