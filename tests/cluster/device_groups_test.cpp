// Groups whose ranks share a device, or have one each: every operation against LibTorch alone on the CPU, and a death. Over
// shared device memory, over NCCL (on stand-in devices, the fake one), and over LibTorch's process group.
#include <csignal>
#include <gmock/gmock.h>

#include <torchspan/collective.h>

#include "tests/conformance/collective_oracle.h"
#include "tests/support/cluster_main.h"
#include "tests/support/device_group.h"
#include "tests/support/torch_nccl.h"

namespace torchspan::device_groups_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using collective::BackendKind;
using collective::Group;
using collective::ReduceOp;
using Tensors = std::vector<at::Tensor>;

/// More than the 16 KiB of ipc_services(), so that operations need several rounds.
constexpr std::int64_t kLarge = 12000;

/// The inputs of one operation: one tensor for each rank, the same on all ranks, in different memory.
class Inputs {
 public:
  Inputs(const Group& group, at::ScalarType dtype, std::int64_t count, std::uint64_t seed)
      : all_(random_inputs(group.size(), {count}, dtype, seed)),
        mine_(static_cast<std::size_t>(group.rank())) {}
  const Tensors& all() const { return all_; }
  const at::Tensor& of(int rank) const { return all_[static_cast<std::size_t>(rank)]; }
  /// This rank's tensor, written late on the current stream.
  at::Tensor mine() const { return late(all_[mine_]); }
  static at::Tensor late(const at::Tensor& tensor) {
    keep_busy(device::current_stream(test_device(0)));
    return tensor.to(test_device(0), /*non_blocking=*/false, /*copy=*/true);
  }

 private:
  const Tensors all_;
  const std::size_t mine_;
};

void require_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  require(got.device() == test_device(0), what + ": the result is on the device");
  require(same_bits(got.cpu(), wanted), what);
}

/// NCCL chooses the order of its sums, and rounds 16-bit numbers after each.
void require_reduced(const at::Tensor& got, const at::Tensor& wanted, ReduceOp reduction,
                     const std::string& what) {
  const at::ScalarType dtype = wanted.scalar_type();
  const bool sums = reduction == collective::kSum || reduction == collective::kAvg;
  if (!sums || !at::isFloatingType(dtype)) return require_same(got, wanted, what);
  const double tolerance = dtype == at::kBFloat16 ? 4e-2 : dtype == at::kHalf ? 5e-3 : 1e-5;
  require(got.scalar_type() == dtype, what + ": dtype");
  require(at::allclose(got.cpu().to(at::kDouble), wanted.to(at::kDouble), tolerance, tolerance), what);
}

std::string text_of(const char* operation, at::ScalarType dtype, std::int64_t count, const Group& group) {
  return std::string(operation) + " of " + c10::toString(dtype) + " [" + std::to_string(count) +
         "] on rank " + std::to_string(group.rank());
}

void reduces(const Group& group, at::ScalarType dtype, std::int64_t count) {
  std::vector<ReduceOp> reductions{collective::kSum, collective::kMin, collective::kMax};
  if (at::isFloatingType(dtype)) reductions.push_back(collective::kAvg);
  for (const ReduceOp reduction : reductions) {
    const Inputs inputs(group, dtype, count * group.size(), 7 + static_cast<std::uint64_t>(reduction));
    const at::Tensor wanted = reduce_alone(inputs.all(), reduction);
    require_reduced(group.all_reduce(inputs.mine(), reduction).wait(), wanted, reduction,
                    text_of("all_reduce", dtype, count, group));
    const at::Tensor part = group.reduce_scatter(inputs.mine(), reduction).wait();
    require_reduced(part, wanted.narrow(0, group.rank() * count, count), reduction,
                    text_of("reduce_scatter", dtype, count, group));
    for (int root = 0; root < group.size(); ++root) {
      const at::Tensor result = group.reduce(inputs.mine(), root, reduction).wait();
      if (group.rank() == root)
        require_reduced(result, wanted, reduction, text_of("reduce", dtype, count, group));
    }
  }
}

void gathers(const Group& group, at::ScalarType dtype, std::int64_t count) {
  const Inputs inputs(group, dtype, count, 21);
  const Tensors all = group.all_gather(inputs.mine()).wait();
  for (int rank = 0; rank < group.size(); ++rank) {
    require_same(all.at(static_cast<std::size_t>(rank)), inputs.of(rank),
                 text_of("all_gather", dtype, count, group));
  }
  const at::Tensor output =
      at::empty({group.size() * count}, at::TensorOptions(dtype).device(test_device(0)));
  require_same(group.all_gather_into_tensor(output, inputs.mine()).wait(), at::cat(inputs.all()),
               text_of("all_gather_into_tensor", dtype, count, group));
  for (int root = 0; root < group.size(); ++root) {
    const Tensors gathered = group.gather(inputs.mine(), root).wait();
    if (group.rank() != root) continue;
    for (int rank = 0; rank < group.size(); ++rank) {
      require_same(gathered.at(static_cast<std::size_t>(rank)), inputs.of(rank),
                   text_of("gather", dtype, count, group));
    }
  }
}

void distributes(const Group& group, at::ScalarType dtype, std::int64_t count) {
  for (int root = 0; root < group.size(); ++root) {
    const Inputs inputs(group, dtype, count, 40 + static_cast<std::uint64_t>(root));
    require_same(group.broadcast(inputs.mine(), root).wait(), inputs.of(root),
                 text_of("broadcast", dtype, count, group));
    Tensors parts;
    for (int rank = 0; group.rank() == root && rank < group.size(); ++rank)
      parts.push_back(Inputs::late(inputs.of(rank)));
    require_same(group.scatter(at::zeros_like(inputs.mine()), parts, root).wait(), inputs.of(group.rank()),
                 text_of("scatter", dtype, count, group));
  }
  // Rank s sends the numbers of rank s, turned by r places, to rank r.
  const Inputs inputs(group, dtype, count, 60);
  Tensors parts;
  for (int rank = 0; rank < group.size(); ++rank)
    parts.push_back(Inputs::late(inputs.of(group.rank()).roll({rank}, {0})));
  const Tensors received = group.all_to_all(parts).wait();
  for (int rank = 0; rank < group.size(); ++rank) {
    require_same(received.at(static_cast<std::size_t>(rank)), inputs.of(rank).roll({group.rank()}, {0}),
                 text_of("all_to_all", dtype, count, group));
  }
}

void passes_on(const Group& group, at::ScalarType dtype, std::int64_t count) {
  if (group.size() == 1) return;
  const Inputs inputs(group, dtype, count, 80);
  const int next = (group.rank() + 1) % group.size();
  const int before = (group.rank() + group.size() - 1) % group.size();
  const auto sent = group.send(inputs.mine(), next);
  require_same(group.recv(at::zeros_like(inputs.mine()), before).wait(), inputs.of(before),
               text_of("recv", dtype, count, group));
  sent.wait();
}

void runs_every_operation(const Group& group) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong}) {
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{333}, kLarge}) {
      reduces(group, dtype, count);
      gathers(group, dtype, count);
      distributes(group, dtype, count);
      passes_on(group, dtype, count);
    }
  }
}

/// Operations on both planes, from a side stream, and in parts of the group.
void mixes_planes_and_parts(const Group& group) {
  const c10::StreamGuard side(device::stream_from_pool(test_device(0)));
  const Group part = group.split(group.rank() % 2, group.rank());
  for (int round = 0; round < 5; ++round) {
    const auto on_device = group.all_reduce(Inputs::late(at::full({1000}, 1.0 + round)));
    const auto on_cpu = group.all_reduce(at::full({10}, 2.0 + round));
    require_same(on_device.wait(), at::full({1000}, (1.0 + round) * group.size()), "the sum on the device");
    require(same_bits(on_cpu.wait(), at::full({10}, (2.0 + round) * group.size())), "the sum on the CPU");
    require_same(part.all_reduce(Inputs::late(at::full({kLarge}, 3.0))).wait(),
                 at::full({kLarge}, 3.0 * part.size()), "the sum of a part");
  }
}

/// Rank 1 dies while the others call an operation. Over NCCL, their devices run it then, and wait for that of rank 1.
void names_the_dead(BackendKind kind, Group& group, Executor& executor) {
  const at::Tensor x = Inputs::late(at::ones({100'000}));
  group.all_reduce(x).synchronize();
  if (group.rank() == 1) {
    for (int i = 0; i < 500; ++i) keep_busy(device::current_stream(test_device(0)));
    if (on_cuda() && kind != BackendKind::kCudaIpc)
      group.all_reduce(x).wait();  // launched, behind the work before it
    ::kill(getpid(), SIGKILL);
  }
  const int rank = group.rank();
  const TimePoint began = executor.now();
  try {
    group.all_reduce(x).synchronize();
    require(false, "the operation fails");
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kDisconnected &&
                std::string(error.what()).find("worker1") != std::string::npos,
            std::string("the error names the dead rank: ") + error.what());
  }
  { const Group dropped = std::move(group); }
  const auto seconds = std::chrono::duration<double>(executor.now() - began).count();
  require(seconds < 30,
          "the others learn of the death, and drop their group, at once: " + std::to_string(seconds));
  end_rank(rank, executor);
}

void on_group(BackendKind kind, const std::function<void(BackendKind, Group&, Executor&)>& body) {
  const bool ipc = kind == BackendKind::kCudaIpc;
  collective::GroupOptions options = ipc ? ipc_options() : nccl_options();
  options.backend = kind;
  if (kind == BackendKind::kC10d) options.process_group = make_torch_nccl;
  with_device_group(options, ipc ? ipc_services() : nccl_services(), [&](Group& group, Executor& executor) {
    body(kind, group, executor);
    for (const std::string& race : TestDevices::take_races()) require(false, "no race: " + race);
    group.barrier();
  });
}

struct Row {
  std::string scenario;
  BackendKind kind;
  int ranks;
};
std::vector<Row> rows() {
  std::vector<Row> all;
  for (const char* scenario : {"operations", "planes"}) {
    for (const int ranks : {2, 3, 4}) all.push_back({scenario, BackendKind::kCudaIpc, ranks});
    for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kC10d}) {
      for (const int ranks : {1, 3}) all.push_back({scenario, kind, ranks});
    }
  }
  for (const BackendKind kind : {BackendKind::kCudaIpc, BackendKind::kNccl, BackendKind::kC10d})
    all.push_back({"death", kind, 3});
  return all;
}
std::string name_of(const Row& row) {
  const bool ipc = row.kind == BackendKind::kCudaIpc;
  return row.scenario +
         (ipc                              ? "_cuda_ipc_"
          : row.kind == BackendKind::kNccl ? "_nccl_"
                                           : "_torch_nccl_") +
         std::to_string(row.ranks);
}

/// Why the row cannot run here; empty if it can.
std::string missing_for(const Row& row) {
  if (row.kind == BackendKind::kCudaIpc) return TestDevices::missing(1);
  const std::string missing = row.kind == BackendKind::kC10d ? torch_nccl_missing() : "";
  return missing.empty() ? nccl_missing(row.ranks) : missing;
}

std::map<std::string, Scenario> scenarios() {
  using Body = std::function<void(BackendKind, Group&, Executor&)>;
  const std::map<std::string, Body> bodies{
      {"operations", [](BackendKind, Group& group, Executor&) { runs_every_operation(group); }},
      {"planes", [](BackendKind, Group& group, Executor&) { mixes_planes_and_parts(group); }},
      {"death", names_the_dead}};
  std::map<std::string, Scenario> made;
  for (const Row& row : rows()) {
    made[name_of(row)] = [kind = row.kind, body = bodies.at(row.scenario)] { on_group(kind, body); };
  }
  return made;
}

class DeviceGroupsOfProcesses : public ::testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(Backends, DeviceGroupsOfProcesses, ::testing::ValuesIn(rows()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(DeviceGroupsOfProcesses, AreRight) {
  const Row& row = GetParam();
  if (const auto missing = missing_for(row); !missing.empty()) GTEST_SKIP() << missing;
  const bool own = row.kind != BackendKind::kCudaIpc;
  ProcessWorld world(row.ranks);
  for (int rank = 0; rank < row.ranks; ++rank) {
    world.start(rank, "device_groups." + name_of(row),
                own ? own_gpu(rank, row.ranks) : std::map<std::string, std::string>());
  }
  if (row.scenario != "death") return expect_all_end_well(world, std::chrono::seconds(120));
  for (const std::size_t rank : {0, 2}) {
    ASSERT_TRUE(world.process(rank).wait(world.executor(), std::chrono::seconds(120))) << "rank " << rank;
    EXPECT_EQ(world.process(rank).exit_code(), 0) << world.process(rank).output();
  }
  ASSERT_TRUE(world.process(1).wait(world.executor(), std::chrono::seconds(10)));
  EXPECT_EQ(world.process(1).exit_code(), 128 + SIGKILL) << world.process(1).output();
}

const testing::Scenarios kScenarios("device_groups", scenarios());

}  // namespace
}  // namespace torchspan::device_groups_test
