// Processes that fork, as data loaders do, and children that end in every way: they leave the parent's connections,
// references, groups and shared memory alone.
#include <csignal>
#include <fmt/format.h>
#include <poll.h>

#include <torch/torch.h>

#include <torchspan/elastic.h>
#include <torchspan/engine/operator_trace.h>
#include <torchspan/sharded.h>
#include <torchspan/torchspan.h>

#include "tests/support/cluster_main.h"
#include "tests/support/gloo.h"

namespace torchspan::forks_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all_end_well;
using ::testing::HasSubstr;
using testing::ProcessWorld;
using testing::require;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
at::Tensor twice(const at::Tensor& tensor) { return tensor * 2; }
at::Tensor weight() { return at::ones({3}).requires_grad_(); }
at::Tensor weigh(const RRef<at::Tensor>& weight, const at::Tensor& x) { return weight.local_value() * x; }
/// Long enough for the caller to fork meanwhile.
Future<std::int64_t> later(Worker& worker) {
  auto promise = std::make_shared<Promise<std::int64_t>>(worker.backend()->continuations());
  worker.backend()->after(seconds(5), [promise] { promise->set_value(7); });
  return promise->future();
}
/// A child that returns from the handler instead of ending. Returns how it ended.
std::int64_t fork_in_handler(bool throws) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (throws) throw std::runtime_error("thrown in the child");
    return 0;
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

void die() { ::kill(::getpid(), SIGKILL); }

constexpr Function<add> kAdd{"add"};
constexpr Function<twice> kTwice{"twice"};
constexpr Function<weight> kWeight{"weight"};
constexpr Function<weigh> kWeigh{"weigh"};
constexpr Function<later> kLater{"later"};
constexpr Function<die> kDie{"die"};
constexpr Function<fork_in_handler> kForkInHandler{"fork_in_handler"};

/// A program with objects of one kind and with what it does with them: on all ranks, or on rank 0 by calls.
struct Program {
  explicit Program(const std::string& kind) : session(WorkerOptions::from_env(), functions()) {
    const std::map<std::string, std::function<void()>> kinds{
        {"calls", [&] { add_calls(); }},
        {"autograd", [&] { add_autograd(); }},
        {"shm", [&] { add_group({.backend = collective::BackendKind::kSharedMemory}); }},
        {"network", [&] { add_group({.backend = collective::BackendKind::kNetwork}); }},
        {"hierarchical",
         [&] { add_group({.backend = collective::BackendKind::kHierarchical, .network = kIsolated}); }},
        {"c10d", [&] { add_group({.backend = collective::BackendKind::kC10d, .network = kIsolated}); }},
        {"sharded", [&] { add_sharded(); }},
        {"pipeline", [&] { add_pipeline(); }},
        {"checkpoint", [&] { add_checkpoint(); }},
        {"averages", [&] { add_averages(); }},
        {"elastic", [&] { add_elastic(); }},
    };
    kinds.at(kind)();
    uses["log_scalar"] = [this] { log_scalar(session, "loss", 0.5); };
    uses["session.group"] = [this] { session.group(); };
    uses["session.barrier"] = [this] { session.worker().barrier(); };
  }

  static FunctionTable functions() {
    return FunctionTable().add(kAdd, kTwice, kWeight, kWeigh, kLater, kForkInHandler, kDie);
  }
  Worker& worker() { return session.worker(); }
  void use_all() const {
    for (const auto& [name, use] : uses) use();
  }
  template <class T, class... Args>
  T& make(Args&&... args) {
    auto object = std::make_shared<T>(std::forward<Args>(args)...);
    objects.push_back(object);
    return *object;
  }

  void add_calls() {
    if (session.rank() != 0) return;
    auto& rref = make<RRef<at::Tensor>>(worker().remote(1, kWeight));
    auto& scope = make<WaitScope>(worker());
    auto& pending = make<Future<std::int64_t>>(worker().rpc_async(1, kLater));
    // From 1 MiB on, the tensor lies in memory that both processes map.
    auto& big = make<at::Tensor>(worker().rpc_sync(1, kTwice, at::ones({1 << 20})));
    auto& promise = make<Promise<std::int64_t>>(worker().backend()->continuations());
    uses["rpc_sync"] = [this] { require(worker().rpc_sync(1, kAdd, 40, 2) == 42, "40 + 2"); };
    uses["two tensors"] = [this, &big] {
      const at::Tensor other = worker().rpc_sync(1, kTwice, at::full({1 << 20}, 4.0));
      require((big == 2).all().item<bool>() && (other == 8).all().item<bool>(), "both tensors");
    };
    uses["remote"] = [this] { worker().remote(1, kWeight).to_here(); };
    uses["to_here"] = [&rref] { require((rref.to_here() == 1).all().item<bool>(), "the value lives"); };
    uses["a call on an RRef"] = [&rref] { static_cast<void>(rref.rpc_sync(kWeigh, at::ones({3}))); };
    uses["a WaitScope"] = [&scope] {
      static_cast<void>(scope.rpc_async(1, kAdd, 1, 2));
      scope.wait();
    };
    uses["a new WaitScope"] = [this] { WaitScope(worker()).wait(); };
    uses["a pending future"] = [&pending] { static_cast<void>(pending.wait_for(milliseconds(1))); };
    at_end = [&pending] { require(pending.wait() == 7, "the pending call"); };
    uses["then"] = [&promise] { promise.future().add_done_callback([](const auto&) {}); };
    uses["a new RRef"] = [this] { RRef<std::int64_t>(worker(), 1).local_value(); };
  }

  void add_autograd() {
    if (session.rank() != 0) return;
    auto& rref = make<RRef<at::Tensor>>(worker().remote(1, kWeight));
    auto& optimizer =
        make<optim::DistributedOptimizer>(session, optim::SGD{.lr = 0.0}, std::vector<optim::Target>{rref});
    auto& scheduled = make<std::optional<autograd::Context>>();
    scheduled.emplace(session);
    auto& loss = make<at::Tensor>(rref.rpc_sync(kWeigh, at::ones({3}).requires_grad_()).sum());
    uses["backward"] = [&scheduled, &loss, &rref] {
      scheduled->backward(loss);
      loss = rref.rpc_sync(kWeigh, at::ones({3}).requires_grad_()).sum();
    };
    uses["optimizer.step"] = [&] {
      optimizer.step(*scheduled);
      loss = rref.rpc_sync(kWeigh, at::ones({3}).requires_grad_()).sum();
    };
    uses["a call in the context"] = [&rref] { static_cast<void>(rref.rpc_sync(kWeigh, at::ones({3}))); };
  }

  void add_group(const collective::GroupOptions& options) {
    auto& group = make<collective::Group>(session.group(options));
    auto& part = make<collective::Group>(group.split(0, group.rank()));
    auto& memory = make<at::Tensor>(group.allocate({1 << 16}, at::kFloat));
    auto& net = make<torch::nn::Linear>(4, 2);
    auto& model = make<DistributedDataParallel<torch::nn::Linear>>(net, group);
    memory.fill_(1);
    uses["all_reduce"] = [&group] {
      at::Tensor sum = at::ones({100});
      group.all_reduce(sum).wait();
      require((sum == group.size()).all().item<bool>(), "the sum");
    };
    uses["all_reduce of shared memory"] = [&group, &memory] {
      require((memory == 1).all().item<bool>(), "the shared memory is as it was");
      group.all_reduce(memory, collective::kMax).wait();
    };
    uses["a part"] = [&part] { part.barrier(); };
    uses["all_gather_bytes"] = [&group] { group.all_gather_bytes(Bytes(3)); };
    uses["split"] = [&group] { group.split(0, 0); };
    uses["a message"] = [&group] {
      at::Tensor tensor = at::ones({3});
      (group.rank() == 0 ? group.send(tensor, 1) : group.recv(tensor, 0)).wait();
    };
    uses["a step"] = [&net, &model] {
      net->zero_grad();
      model.forward(at::ones({3, 4})).sum().backward();
    };
  }

  void add_sharded() {
    auto& net = make<torch::nn::Linear>(4, 2);
    auto& model = make<FullyShardedDataParallel<torch::nn::Linear>>(net, session.group());
    auto& other = make<torch::nn::Linear>(4, 2);
    auto& ddp = make<DistributedDataParallel<torch::nn::Linear>>(other, session.group());
    auto& zero = make<ZeroRedundancyOptimizer>(ddp, optim::Adam{.lr = 0.1},
                                               sharded::ZeroOptions{.overlap_forward = true});
    uses["a step of FSDP"] = [&model] { model.forward(at::ones({3, 4})).sum().backward(); };
    uses["a step of ZeRO"] = [&ddp, &zero] {
      ddp.forward(at::ones({3, 4})).sum().backward();
      zero.step();
    };
  }

  void add_pipeline() {
    pipeline::Layers layers;
    for (int i = 0; i < 2; ++i) layers.add<torch::nn::Linear>(3, 3);
    auto& pipe =
        make<pipeline::Pipeline>(session.worker(), layers, pipeline::PipelineOptions{.balance = {1, 1}});
    uses["a step of a pipeline"] = [&pipe] {
      pipe.train_step(
          at::ones({4, 3}), at::ones({4, 3}),
          [](const at::Tensor& output, const at::Tensor& target) { return at::mse_loss(output, target); });
    };
  }

  void add_checkpoint() {
    auto& net = make<torch::nn::Linear>(4, 2);
    auto& manager = make<CheckpointManager>(session, CheckpointOptions{.directory = variable("TEST_FOLDER")});
    manager.add("model", net);
    auto& step = make<std::int64_t>(0);
    uses["a checkpoint"] = [&manager, &step] {
      manager.save(++step);
      manager.wait();
    };
  }

  void add_averages() {
    auto& net = make<torch::nn::Linear>(4, 2);
    auto& other = make<torch::nn::Linear>(4, 2);
    const auto group = session.group();
    auto& averager = make<data_parallel::ModelAverager>(net->parameters(), group, 1);
    auto& outer = make<data_parallel::DiLoCo>(other->parameters(), group,
                                              data_parallel::DiLoCoOptions{.period = 2, .delay = 1});
    // Two steps each, so that an average is in flight when the process forks.
    uses["averages"] = [&averager] { averager.step(); };
    uses["averages in flight"] = [&outer] {
      outer.step();
      outer.step();
    };
    at_end = [&outer] { outer.finish(); };
  }

  void add_elastic() {
    auto& net = make<torch::nn::Linear>(4, 2);
    auto& trainer =
        make<ElasticTrainer<torch::nn::Linear>>(session, net, ElasticOptions{.samples = 64, .batch = 4});
    uses["steps of an elastic trainer"] = [&trainer] {
      trainer.run(
          trainer.position().step + 2,
          [](auto& model, const ElasticStep& step) {
            (model.forward(at::ones({4, 4})).sum() * step.weight).backward();
          },
          [](const ElasticStep&) {});
    };
  }

  static constexpr auto kIsolated = collective::Network::kIsolated;
  Session session;
  std::map<std::string, std::function<void()>> uses;
  std::function<void()> at_end = [] {};
  std::vector<std::shared_ptr<void>> objects;

  ~Program() {
    uses.clear();
    while (!objects.empty()) objects.pop_back();
  }
};

/// In the child: each use fails at once and says why.
int try_all_uses(const Program& program) {
  const auto executor = make_executor();
  for (const auto& [name, use] : program.uses) {
    const TimePoint began = executor->now();
    std::string text = "did not fail";
    try {
      use();
    } catch (const std::exception& error) {
      text = error.what();
    }
    if (text.find("is a fork of worker 'worker0'") == std::string::npos ||
        executor->now() - began > milliseconds(500)) {
      std::fprintf(stderr, "%s in the child: %s\n", name.c_str(), text.c_str());
      return 1;
    }
  }
  return 0;
}

struct Thrown {};

/// Ends a child in this way; `program` is in static memory for "exit".
void end_child(const std::string& ending, const Program& program) {
  if (ending == "exit") std::exit(0);
  if (ending == "exec") {
    ::execl("/nonexistent/program", "program", nullptr);
    std::exit(127);
  }
  if (ending == "throw") throw Thrown();
  if (ending == "use") std::exit(try_all_uses(program));
}

/// Returns the exit code of a child, or -1 if it did not end in time.
int wait_for(pid_t child, Executor& executor) {
  const Deadline deadline = executor.deadline_in(seconds(10));
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (deadline.passed(executor.now())) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return -1;
    }
    executor.sleep(milliseconds(5));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Forks a child for each of `endings`, and uses everything before and after it.
void fork_children(Program& program, const std::vector<std::string>& endings) {
  for (const std::string& ending : endings) {
    program.use_all();
    if (program.session.rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) return end_child(ending, program);
      const int expected = ending == "exec" ? 127 : 0;
      const int code = wait_for(child, program.session.runtime().executor);
      require(code == expected, fmt::format("the child that ends by {} ended with {}", ending, code));
    }
    program.use_all();
    program.use_all();
  }
  program.at_end();
  program.uses.clear();
  while (!program.objects.empty()) program.objects.pop_back();
  program.session.shutdown();
}

/// TEST_KIND: what the program has; TEST_MEMORY: where its objects are, which decides how children can end.
void forks() {
  const std::string kind = variable("TEST_KIND");
  const pid_t parent = ::getpid();
  if (variable("TEST_MEMORY") == "static") {
    static std::optional<Program> program;  // destroyed by exit()
    program.emplace(kind);
    fork_children(*program, {"exit", "exec", "use"});
    return;
  }
  try {
    Program program(kind);
    fork_children(program, {"return", "throw"});
  } catch (const Thrown&) {
  }
  if (::getpid() != parent) std::exit(0);
}

using Case = std::tuple<std::string, std::string>;
class Forks : public ::testing::TestWithParam<Case> {};

TEST_P(Forks, LeaveTheParentAndItsPeersAlone) {
  const auto& [kind, memory] = GetParam();
  if (kind == "c10d" && !testing::kHasGloo) GTEST_SKIP() << "this build has no Gloo";
  const testing::TemporaryFolder folder;
  ProcessWorld world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world.start(rank, "forks.forks",
                {{"TEST_KIND", kind}, {"TEST_MEMORY", memory}, {"TEST_FOLDER", folder.path()}});
  }
  expect_all_end_well(world, seconds(60));
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Forks,
    ::testing::Combine(::testing::Values("calls", "autograd", "shm", "network", "hierarchical", "c10d",
                                         "sharded", "pipeline", "checkpoint", "averages", "elastic"),
                       ::testing::Values("static", "automatic")),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param); });

/// Four threads call, sum, keep references and run operators, which are traced, while the process forks 15 times.
void forks_under_load() {
  static std::optional<Session> session;
  session.emplace(WorkerOptions::from_env(), Program::functions());
  static std::optional<collective::Group> group;
  group.emplace(session->group());
  Executor& executor = session->runtime().executor;
  const OperatorTrace operators(session->runtime().spans);
  std::atomic<bool> over{false};
  std::atomic<std::int64_t> calls{0};
  std::vector<Thread> threads;
  for (int i = 0; session->rank() == 0 && i < 2; ++i) {
    threads.push_back(executor.spawn("operators", [&] {
      while (!over.load()) at::ones({2}).add_(1);
    }));
  }
  for (int i = 0; session->rank() == 0 && i < 4; ++i) {
    threads.push_back(executor.spawn("calls", [&] {
      Worker& worker = session->worker();
      while (!over.load()) {
        const RRef<at::Tensor> rref = worker.remote(1, kWeight);
        require(worker.rpc_sync(1, kAdd, 40, 2) == 42, "40 + 2");
        require((worker.rpc_sync(1, kTwice, at::ones({1 << 18})) == 2).all().item<bool>(), "twice");
        static_cast<void>(rref.rpc_sync(kWeigh, at::ones({3})));
        ++calls;
      }
    }));
  }
  for (int round = 0; round < 15; ++round) {
    at::Tensor sum = at::ones({1000});
    const auto pending = group->all_reduce(sum);
    if (session->rank() == 0) {
      const pid_t child = ::fork();
      if (child == 0) std::exit(at::ones({2}).sum().item<float>() == 2 ? 0 : 3);
      const int code = wait_for(child, executor);
      require(code == 0, fmt::format("child {} ended with {}", round, code));
    }
    pending.wait();
    require((sum == 2).all().item<bool>(), "the sum");
  }
  over = true;
  threads.clear();
  if (session->rank() == 0) require(calls.load() > 0, "calls went on");
  group.reset();
  session->shutdown();
}

TEST(ForkedProcesses, EndWellWhileThreadsOfTheParentCall) {
  ProcessWorld world(2);
  const testing::TemporaryFolder folder;
  for (int rank = 0; rank < 2; ++rank) {
    world.start(rank, "forks.forks_under_load", {{"TORCHSPAN_TRACE", folder.path()}});
  }
  expect_all_end_well(world, seconds(120));
}

/// Rank 1 forks a child that lives longer than it does; rank 0 waits in a group.
void dies_before_its_child() {
  const std::string kind = variable("TEST_KIND");
  Program program(kind);
  Executor& executor = program.session.runtime().executor;
  if (program.session.rank() == 1) {
    const pid_t parent = ::getpid();
    if (::fork() == 0) {
      while (::getppid() == parent) ::poll(nullptr, 0, 10);
      ::poll(nullptr, 0, 8000);
      ::_exit(0);
    }
    die();
  }
  const TimePoint began = executor.now();
  try {
    program.uses.at("a part")();
    require(false, "the part has two ranks");
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kDisconnected, error.what());
  }
  require(executor.now() - began < seconds(5), "the death is noticed although the child lives");
  program.session.abort(std::make_exception_ptr(std::runtime_error("rank 1 died")));
}

class ForkedProcess : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Groups, ForkedProcess, ::testing::Values("shm", "network", "hierarchical", "c10d"),
                         [](const auto& info) { return info.param; });

TEST_P(ForkedProcess, DoesNotHideTheDeathOfItsParent) {
  if (GetParam() == "c10d" && !testing::kHasGloo) GTEST_SKIP() << "this build has no Gloo";
  ProcessWorld world(2);
  for (int rank = 0; rank < 2; ++rank)
    world.start(rank, "forks.dies_before_its_child", {{"TEST_KIND", GetParam()}});
  EXPECT_TRUE(world.process(0).wait(world.executor(), seconds(30)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
}

/// The children of handlers return into the library.
void forks_in_handlers() {
  Session session(WorkerOptions::from_env(), Program::functions());
  if (session.rank() == 0) {
    for (const bool throws : {false, true}) {
      const std::int64_t status =
          session.worker().with({.timeout = seconds(20)}).rpc_sync(1, kForkInHandler, throws);
      require(WIFEXITED(status) && WEXITSTATUS(status) == 1,
              fmt::format("the child ended with {:#x}", status));
      require(session.worker().rpc_sync(1, kAdd, 40, 2) == 42, "40 + 2");
    }
  }
  session.shutdown();
}

TEST(ForkedProcesses, EndWhenTheyReturnFromAHandler) {
  ProcessWorld world(2);
  world.start_all("forks.forks_in_handlers");
  expect_all_end_well(world);
  EXPECT_THAT(world.process(1).output(), HasSubstr("was forked in a handler"));
}

const testing::Scenarios kScenarios("forks", {{"forks", forks},
                                              {"forks_under_load", forks_under_load},
                                              {"dies_before_its_child", dies_before_its_child},
                                              {"forks_in_handlers", forks_in_handlers}});

}  // namespace
}  // namespace torchspan::forks_test
