// Tensors between devices of real processes through memory that both map: values, a peer that dies in each phase,
// a peer that leaves while its process lives, and processes that cannot share memory; large tensors in parts; gradients
// of passes.
#include <filesystem>

#include <torch/torch.h>

#include <torchspan/autograd.h>

#include "tests/support/device_worker.h"
#include "tests/support/errors.h"
#include "tests/support/test_device.h"

namespace torchspan::device_memory_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kElements = 1 << 15;  // 256 KiB

at::Tensor twice(const at::Tensor& x) { return x * 2; }
/// Dies when it has copied its argument, usually before it has returned the memory.
void die(const at::Tensor&) { ::kill(getpid(), SIGKILL); }
/// The same with the gradient of its result.
at::Tensor die_in_backward(const at::Tensor& x) {
  at::Tensor y = x * x;
  y.register_hook([](const at::Tensor& gradient) {
    ::kill(getpid(), SIGKILL);
    return gradient;
  });
  return y;
}

constexpr Function<twice> kTwice{"twice"};
constexpr Function<die> kDie{"die"};
constexpr Function<die_in_backward> kDieInBackward{"die_in_backward"};

/// Maps memory of a device, or dies first, or refuses to.
class FragileRuntime final : public device::DeviceRuntime {
 public:
  FragileRuntime(std::string dies_in, std::string refusal)
      : dies_in_(std::move(dies_in)), refusal_(std::move(refusal)) {}
  c10::DeviceType type() const override { return inner_->type(); }
  void* native_stream(const c10::Stream& stream) const override { return inner_->native_stream(stream); }
  std::string identity(c10::Device device) const override { return inner_->identity(device); }
  std::shared_ptr<std::byte> allocate(c10::Device device, std::size_t bytes) const override {
    die_in("allocate");
    return inner_->allocate(device, bytes);
  }
  Bytes export_memory(c10::Device device, const std::byte* allocation) const override {
    return inner_->export_memory(device, allocation);
  }
  std::shared_ptr<std::byte> open_memory(c10::Device device, BytesView handle,
                                         std::size_t bytes) const override {
    die_in("open");
    if (!refusal_.empty()) throw Error(ErrorKind::kUnsupported, refusal_);
    auto memory = inner_->open_memory(device, handle, bytes);
    die_in("opened");
    return memory;
  }

 private:
  void die_in(const std::string& phase) const {
    if (phase == dies_in_) ::kill(getpid(), SIGKILL);
  }
  const std::string dies_in_, refusal_;
  const std::shared_ptr<const device::DeviceRuntime> inner_ = test_runtime();
};

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

/// A worker whose memory may be fragile, and that calls the other one.
class CallingWorker : public DeviceWorker {
 public:
  CallingWorker()
      : DeviceWorker(FunctionTable().add(kTwice, kDie, kDieInBackward),
                     std::make_shared<FragileRuntime>(variable("TEST_DIES_IN"), variable("TEST_REFUSES"))) {}

  /// Calls until arguments go through device memory, or a call fails.
  void connect() {
    for (int i = 0; i < 500 && sent(worker()) == 0; ++i) {
      check_call(i);
      executor().sleep(std::chrono::milliseconds(5));
    }
    require(sent(worker()) > 0, "a tensor went through device memory");
  }
  /// The same for results, too.
  void connect_both() {
    connect();
    for (int i = 0; i < 500 && worker().rpc_sync(1, kSent) == 0; ++i) {
      check_call(i);
      executor().sleep(std::chrono::milliseconds(5));
    }
    require(worker().rpc_sync(1, kSent) > 0, "a result went through device memory");
    await_returns(*this);  // the areas of both are free again
  }
  void check_call(double value, std::int64_t elements = kElements) {
    const at::Tensor x = at::full({elements}, value, at::kDouble).to(test_device(0));
    const at::Tensor y = worker().rpc_sync(1, kTwice, x);
    require(y.device() == test_device(0), "the result is on " + y.device().str());
    require(at::equal(y.cpu(), at::full({elements}, 2 * value, at::kDouble)),
            "the values are twice as large");
  }
};

/// Whether this process owns so many areas of stand-in memory; always on CUDA devices, whose memory has no names.
bool owns_areas(std::size_t wanted) {
  if (on_cuda()) return true;
  const std::string prefix = "torchspan-stand-in-" + std::to_string(getpid()) + "-";
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    count += entry.path().filename().string().starts_with(prefix) ? 1 : 0;
  return count == wanted;
}
/// Removes what a killed process left.
void remove_areas_of(pid_t process) {
  const std::string prefix = "torchspan-stand-in-" + std::to_string(process) + "-";
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    if (entry.path().filename().string().starts_with(prefix)) std::filesystem::remove(entry.path());
  }
}

void exchange() {
  StandInStreams::get().reset(/*polls=*/10);
  auto owned = std::make_unique<CallingWorker>();
  CallingWorker& self = *owned;
  if (self.worker().rank() == 0) {
    self.connect();
    for (int i = 0; i < 50; ++i) self.check_call(i);
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 50; ++i) {
      const at::Tensor x = at::full({kElements}, i, at::kDouble).to(test_device(0));
      all.push_back(self.worker().rpc_async(1, kTwice, x));
      x.fill_(-1);
    }
    for (int i = 0; i < 50; ++i) {
      require(at::equal(all[static_cast<std::size_t>(i)].wait().cpu(),
                        at::full({kElements}, 2.0 * i, at::kDouble)),
              "the values of the moment of the call");
    }
    require(self.worker().rpc_sync(1, kSent) > 0, "a result went through device memory");
  }
  self.shutdown();
  require_no_race();
  owned.reset();
  require(owns_areas(0), "the memory is freed with the worker");
}

/// Tensors that are larger than the shared memory, and of which the devices copy the parts while others are sent. Unless
/// TEST_REFUSES, through that memory.
void exchange_large() {
  StandInStreams::get().reset(/*polls=*/10);
  CallingWorker self;
  const bool shared = variable("TEST_REFUSES").empty();
  if (self.worker().rank() == 0) {
    if (shared) self.connect_both();
    // While the memory was in use, a tensor of one part may have gone as such.
    const auto count = [&](const char* name) { return counter(self.worker(), name); };
    const std::int64_t before = sent(self.worker());
    const std::int64_t sent_before = count("rpc.tensor_parts.sent");
    const std::int64_t received_before = count("rpc.tensor_parts.received");
    for (int i = 0; i < 3; ++i) self.check_call(i, 40 * kElements + i);
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = at::full({(32 + i) * kElements}, i, at::kDouble).to(test_device(0));
      all.push_back(self.worker().rpc_async(1, kTwice, x));
      x.fill_(-1);
    }
    for (int i = 0; i < 6; ++i) {
      require(at::equal(all[static_cast<std::size_t>(i)].wait().cpu(),
                        at::full({(32 + i) * kElements}, 2.0 * i, at::kDouble)),
              "the values of the moment of the call");
    }
    require(count("rpc.tensor_parts.sent") - sent_before == 9, "all arguments were sent in parts");
    const std::int64_t parts = count("rpc.tensor_parts.received") - received_before;
    if (shared) {
      // Of 256 KiB: 40 or 41 of each of the first three, and 32 + i of each of the others.
      const int wanted = 3 * 40 + 2 + 6 * 32 + 15;
      require(parts == wanted,
              "all results came in parts: " + std::to_string(parts) + " of " + std::to_string(wanted));
      require(sent(self.worker()) - before == parts, "all parts went through device memory");
      await_returns(self);
    } else {
      require(parts == 8 * 3 + 2, "all results came in parts");
      require(sent(self.worker()) == 0, "no part went through device memory");
    }
  }
  self.shutdown();
  require_no_race();
}

/// Over connections that carry tensors of any size from device to device.
void exchange_over_ucx() {
  StandInStreams::get().reset(/*polls=*/10);
  CallingWorker self;
  if (self.worker().rank() == 0) {
    self.connect_both();
    const std::int64_t before = sent(self.worker());
    for (int i = 0; i < 3; ++i) self.check_call(i, 40 * kElements + i);
    std::vector<Future<at::Tensor>> all;
    for (int i = 0; i < 50; ++i) {
      const at::Tensor x = at::full({kElements + i}, i, at::kDouble).to(test_device(0));
      all.push_back(self.worker().rpc_async(1, kTwice, x));
      x.fill_(-1);
    }
    for (int i = 0; i < 50; ++i) {
      require(at::equal(all[static_cast<std::size_t>(i)].wait().cpu(),
                        at::full({kElements + i}, 2.0 * i, at::kDouble)),
              "the values of the moment of the call");
    }
    require(sent(self.worker()) - before == 53, "all arguments went from device to device");
    require(counter(self.worker(), "rpc.tensor_parts.sent") == 0, "none went in parts");
    await_returns(self);
  }
  self.shutdown();
  require_no_race();
}

/// Backward passes: the gradients of results and of arguments.
void differentiate() {
  StandInStreams::get().reset(/*polls=*/10);
  CallingWorker self;
  Worker& worker = self.worker();
  if (worker.rank() == 0) {
    self.connect_both();
    for (int i = 1; i <= 20; ++i) {
      await_returns(self);
      const std::int64_t here = sent(worker), there = worker.rpc_sync(1, kSent);
      const at::Tensor x = at::full({kElements}, i, at::kDouble).to(test_device(0)).requires_grad_();
      autograd::Context context(worker);
      const at::Tensor y = worker.rpc_sync(1, kTwice, x);
      context.backward((y * y).sum());
      const at::Tensor gradient = context.gradient(x);
      require(gradient.device() == test_device(0), "the gradient is on " + gradient.device().str());
      require(at::equal(gradient.cpu(), at::full({kElements}, 8.0 * i, at::kDouble)),
              "the gradient of 4 x^2");
      require(sent(worker) - here == 2, "an argument and a gradient go through device memory");
      require(worker.rpc_sync(1, kSent) - there == 2, "a result and a gradient go through device memory");
    }
  }
  self.shutdown();
  require_no_race();
}

/// Two processes that cannot map each other's memory, as in containers of which each has its own processes.
void exchange_without_shared_memory() {
  CallingWorker self;
  if (self.worker().rank() == 0) {
    for (int i = 0; i < 50; ++i) {
      self.check_call(i);
      self.executor().sleep(std::chrono::milliseconds(5));
    }
    require(sent(self.worker()) == 0, "no tensor goes through memory that the peer cannot map");
  }
  self.shutdown();
}

/// Dies after the first parts of a large tensor.
void die_in_parts() {
  CallingWorker self;
  while (counter(self.worker(), "rpc.tensor_parts.received") < 5)
    self.executor().sleep(std::chrono::microseconds(50));
  ::kill(getpid(), SIGKILL);
}

/// Calls until the other worker is dead, which an error says; then its memory is freed.
void outlive() {
  CallingWorker self;
  const std::string phase = variable("TEST_DIES_IN");
  const bool during_a_call = phase.empty() || phase == "backward" || phase == "parts";
  bool died = false;
  try {
    for (int i = 0; !during_a_call && i < 1000; ++i) {
      self.check_call(i);
      self.executor().sleep(std::chrono::milliseconds(5));
    }
    self.connect();
    const at::Tensor x = at::ones({kElements}, at::kDouble).to(test_device(0));
    if (phase == "parts") {
      const std::int64_t before = sent(self.worker());
      try {
        self.check_call(1, 1000 * kElements);
      } catch (const Error&) {
        require(sent(self.worker()) >= before + 5, "parts went through device memory");
        throw;
      }
    }
    if (phase == "backward") {
      autograd::Context context(self.worker());
      const at::Tensor y = self.worker().rpc_sync(1, kDieInBackward, x.requires_grad_());
      const std::int64_t before = sent(self.worker());
      try {
        context.backward(y.sum());
      } catch (const Error&) {
        require(sent(self.worker()) > before, "the gradient went through device memory");
        throw;
      }
    }
    self.worker().rpc_sync(1, kDie, x);
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kDisconnected, error.what());
    require(error.worker() == "worker1", error.what());
    died = true;
  }
  require(died, "a call to a dead worker fails");
  require(await(self.executor(), [] { return owns_areas(0); }), "its memory is freed");
  self.stop();
}
void die_early() {
  CallingWorker self;
  self.executor().sleep(std::chrono::seconds(60));
}

/// The worker leaves, and its process lives: its device may still read the memory.
void keep_for_the_living() {
  auto self = std::make_unique<CallingWorker>();
  const std::string marker = variable("TORCHSPAN_RUNTIME_DIR") + "/may-end";
  if (self->worker().rank() == 1) {
    const std::string leave = variable("TORCHSPAN_RUNTIME_DIR") + "/may-leave";
    require(await(self->executor(), [&] { return std::filesystem::exists(leave); }), "it may leave");
    self->stop();
    require(await(self->executor(), [&] { return std::filesystem::exists(marker); }), "it may end");
    std::fflush(nullptr);
    ::_exit(0);
  }
  self->connect();
  std::ofstream(variable("TORCHSPAN_RUNTIME_DIR") + "/may-leave") << "1";
  require(await(self->executor(), [&] { return !self->worker().backend()->is_present(1); }), "it left");
  self->executor().sleep(std::chrono::seconds(2));
  require(owns_areas(1), "the memory is kept while the process lives");
  std::ofstream(marker) << "1";
  require(await(self->executor(), [] { return owns_areas(0); }), "then it is freed");
  self->stop();
}

TEST(ClusterDeviceMemory, TwoProcessesExchangeTensors) {
  ProcessWorld world(2);
  world.start_all("device_memory.exchange");
  expect_all_end_well(world);
}

TEST(ClusterDeviceMemory, GradientsOfTwoProcessesGoThroughIt) {
  ProcessWorld world(2);
  world.start_all("device_memory.differentiate");
  expect_all_end_well(world);
}

TEST(ClusterDeviceMemory, TwoProcessesExchangeTensorsOverUcx) {
  run_over_ucx("device_memory.exchange_over_ucx");
}

TEST(ClusterDeviceMemory, GradientsOfTwoProcessesGoOverUcx) { run_over_ucx("device_memory.differentiate"); }

TEST(ClusterDeviceMemory, TensorsGoThroughTheHostIfTheUcxOfOneProcessCarriesNone) {
  for (const int rank : {0, 1}) run_over_ucx("device_memory.exchange_without_shared_memory", 2, rank);
}

TEST(ClusterDeviceMemory, LargerTensorsGoInParts) {
  ProcessWorld world(2);
  world.start_all("device_memory.exchange_large");
  expect_all_end_well(world);
}

TEST(ClusterDeviceMemory, LargerTensorsGoThroughTheHostInPartsWithoutIt) {
  ProcessWorld world(2);
  for (const int rank : {0, 1})
    world.start(rank, "device_memory.exchange_large", {{"TEST_REFUSES", "as the test wants"}});
  expect_all_end_well(world);
}

std::size_t count_of(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

/// Containers without a shared process namespace: the driver refuses the handle of the other process.
TEST(ClusterDeviceMemory, ProcessesThatCannotShareMemoryWarnOnceAndUseHostMemory) {
  ProcessWorld world(2);
  const std::string reason = "device memory of process 17 cannot be mapped here: invalid device context";
  for (const int rank : {0, 1})
    world.start(rank, "device_memory.exchange_without_shared_memory", {{"TEST_REFUSES", reason}});
  expect_all_end_well(world);
  const std::string sender = world.process(0).output(), receiver = world.process(1).output();
  const std::string devices = test_device(0).str() + " of worker 'worker0' (rank 0)";
  EXPECT_EQ(
      count_of(sender, "tensors on " + devices + " go to worker 'worker1' (rank 1) through host memory"), 1)
      << sender;
  EXPECT_EQ(count_of(sender, reason), 1) << sender;
  EXPECT_THAT(sender, ::testing::HasSubstr("run them in one container"));
  EXPECT_THAT(sender, ::testing::HasSubstr("WorkerOptions::device_staging_bytes"));
  const std::string back = test_device(1 % test_device_count()).str() + " of worker 'worker1' (rank 1)";
  EXPECT_EQ(count_of(receiver, "tensors on " + back + " go to worker 'worker0' (rank 0) through host memory"),
            1)
      << receiver;
}

class ClusterDeviceMemoryDeath : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(In, ClusterDeviceMemoryDeath,
                         ::testing::Values("open", "opened", "allocate", "call", "backward", "parts"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(ClusterDeviceMemoryDeath, TheOtherWorkerGetsAnErrorAndItsMemoryBack) {
  ProcessWorld world(2);
  const std::string phase = GetParam();
  const bool in_a_call = phase == "call" || phase == "backward" || phase == "parts";
  const std::string dies_in = in_a_call ? "" : phase;
  world.start(0, "device_memory.outlive",
              {{"TEST_DIES_IN", phase == "call" ? ""
                                : in_a_call     ? phase
                                                : "never"}});
  Process& dying = world.start(1, phase == "parts" ? "device_memory.die_in_parts" : "device_memory.die_early",
                               {{"TEST_DIES_IN", dies_in}});
  EXPECT_TRUE(world.process(0).wait(world.executor(), std::chrono::seconds(60)));
  EXPECT_EQ(world.process(0).exit_code(), 0) << world.process(0).output();
  EXPECT_TRUE(dying.wait(world.executor(), std::chrono::seconds(10)));
  EXPECT_EQ(dying.exit_code(), 128 + SIGKILL) << dying.output();
  remove_areas_of(dying.pid());
}

TEST(ClusterDeviceMemory, TheMemoryOfAWorkerThatLeftIsKeptUntilItsProcessEnds) {
  ProcessWorld world(2);
  world.start_all("device_memory.keep_for_the_living");
  expect_all_end_well(world);
  remove_areas_of(world.process(1).pid());
}

const testing::Scenarios kScenarios("device_memory",
                                    {{"exchange", exchange},
                                     {"exchange_large", exchange_large},
                                     {"exchange_over_ucx", exchange_over_ucx},
                                     {"differentiate", differentiate},
                                     {"exchange_without_shared_memory", exchange_without_shared_memory},
                                     {"outlive", outlive},
                                     {"die_early", die_early},
                                     {"die_in_parts", die_in_parts},
                                     {"keep_for_the_living", keep_for_the_living}});

}  // namespace
}  // namespace torchspan::device_memory_test
