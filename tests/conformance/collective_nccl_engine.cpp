// One communicator of NCCL without a group around it: over the fake NCCL on a stand-in device or, with
// TORCHSPAN_TEST_DEVICE=cuda, over the installed one on a GPU.
#include <gmock/gmock.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/log.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/nccl/nccl_engine.h"
#include "collective/single.h"
#include "tests/support/errors.h"
#include "tests/support/fake_nccl/fake_nccl.h"
#include "tests/support/test_device.h"

namespace torchspan::testing::collective_nccl_engine {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

/// A control group that claims to have a second rank, which never does anything.
class WithAbsentRank final : public Backend {
 public:
  explicit WithAbsentRank(std::shared_ptr<Backend> here) : here_(std::move(here)) {}

  std::string name() const override { return here_->name(); }
  int rank() const override { return 0; }
  const std::vector<int>& ranks() const override { return ranks_; }
  Runtime& runtime() const override { return here_->runtime(); }
  std::shared_ptr<Backend> split(int color, int key) override { return here_->split(color, key); }
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) override {
    return here_->all_reduce(std::move(tensor), reduction);
  }
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) override {
    return here_->reduce_scatter(std::move(tensor), reduction);
  }
  Future<Tensors> all_gather(at::Tensor tensor) override { return here_->all_gather(std::move(tensor)); }
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override {
    return here_->broadcast(std::move(tensor), root);
  }
  Future<Tensors> all_to_all(Tensors parts) override { return here_->all_to_all(std::move(parts)); }
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override {
    return here_->all_gather_bytes(mine, timeout);
  }
  void barrier(Duration timeout) override { here_->barrier(timeout); }
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return here_->allocate(sizes, dtype);
  }
  void abort(const Error& cause) override { here_->abort(cause); }
  std::optional<Error> failure() override { return here_->failure(); }

 private:
  const std::shared_ptr<Backend> here_;
  const std::vector<int> ranks_{0, 1};
};

/// What an engine of one rank needs.
class NcclEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto missing = TestDevices::missing(1); !missing.empty()) GTEST_SKIP() << missing;
    TestDevices::reset();
    device_ = test_device(0);
    control_ = SingleBackend::make(0, runtime_, nullptr, device_);
    library_ = nccl::NcclLibrary::load(on_cuda() ? std::string() : fake_nccl());
  }

  EngineParts parts(std::shared_ptr<Backend> control, Duration timeout = seconds(60)) const {
    return {.control = std::move(control),
            .device = device_,
            .runtime = test_runtime(),
            .failure = failure_,
            .departed = [] { return std::nullopt; },
            .timeout = timeout};
  }
  std::unique_ptr<nccl::NcclEngine> make() const {
    return std::make_unique<nccl::NcclEngine>(library_, parts(control_));
  }
  at::Tensor values(at::ScalarType dtype) const {
    return at::arange(6).remainder(2).view({2, 3}).to(dtype).to(device_);
  }
  /// Checks the values of a tensor on the device.
  static void expect_values(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
    EXPECT_TRUE(at::equal(got.cpu(), wanted.cpu())) << what << " of " << wanted.scalar_type();
  }

  c10::Device device_{c10::kCPU};
  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Runtime> runtime_ = std::make_shared<Runtime>(*executor_, "worker0", LogLevel::kOff);
  const std::shared_ptr<GroupFailure> failure_ = std::make_shared<GroupFailure>();
  std::shared_ptr<Backend> control_;
  std::shared_ptr<const nccl::NcclLibrary> library_;
};

TEST_F(NcclEngine, OfOneRankRunsEveryOperationOnEveryDtype) {
  const auto engine = make();
  EXPECT_EQ(engine->name(), "nccl");
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte,
                                     at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
    const at::Tensor wanted = values(dtype);
    for (const ReduceOp reduction : {kSum, kAvg, kMin, kMax, kProduct}) {
      if (!engine->reduces(dtype, reduction)) continue;
      const at::Tensor reduced = wanted.clone(), part = at::zeros_like(wanted);
      engine->all_reduce(reduced, reduction);
      engine->reduce_scatter(wanted, part, reduction);
      expect_values(reduced, wanted, "all_reduce " + to_string(reduction));
      expect_values(part, wanted, "reduce_scatter " + to_string(reduction));
    }
    const at::Tensor sent = wanted.clone(), received = at::zeros_like(wanted);
    engine->broadcast({sent}, {0});
    engine->all_to_all({sent}, {received});
    expect_values(sent, wanted, "broadcast");
    expect_values(received, wanted, "all_to_all");
  }
  EXPECT_FALSE(engine->failure());
  for (const ReduceOp bitwise : {kBitAnd, kBitOr, kBitXor}) EXPECT_FALSE(engine->reduces(at::kInt, bitwise));
}

TEST_F(NcclEngine, ThatWasAbortedFailsLaterCallsAndCanBeFollowedByAnother) {
  const auto engine = make();
  const at::Tensor tensor = values(at::kFloat);
  engine->all_reduce(tensor, kSum);
  engine->abort();
  engine->abort();
  const Error error = error_of([&] { engine->all_reduce(tensor, kSum); });
  EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
  EXPECT_THAT(error.what(), HasSubstr("was aborted"));
  EXPECT_FALSE(engine->failure());
  const auto next = make();
  next->all_reduce(tensor, kSum);
  expect_values(tensor, values(at::kFloat), "all_reduce");
}

TEST_F(NcclEngine, IsDestroyedAfterItsWorkOrAbortedIfTheGroupHasFailed) {
  const auto destroy = [&](std::unique_ptr<nccl::NcclEngine> engine) {
    const TimePoint began = executor_->now();
    engine.reset();
    EXPECT_LT(executor_->now() - began, seconds(30));
  };
  std::optional<FakeNccl> fake;
  if (!on_cuda()) fake.emplace();
  const int destroyed = fake ? fake->destroyed() : 0, aborted = fake ? fake->aborted() : 0;
  auto working = make();
  working->all_reduce(values(at::kFloat), kSum);
  destroy(std::move(working));
  if (fake) {  // the installed NCCL counts nothing
    EXPECT_EQ(fake->destroyed(), destroyed + 1);
    EXPECT_EQ(fake->aborted(), aborted);
  }
  auto failed = make();
  failure_->set(Error(ErrorKind::kDisconnected, "worker1 is gone"));
  destroy(std::move(failed));
  if (!fake) return;
  EXPECT_EQ(fake->destroyed(), destroyed + 1);
  EXPECT_EQ(fake->aborted(), aborted + 1);
}

/// NCCL itself would wait for the rank without a limit.
TEST_F(NcclEngine, WhoseOtherRankNeverComesIsAnErrorAfterTheTimeout) {
  const auto control = std::make_shared<WithAbsentRank>(control_);
  const TimePoint began = executor_->now();
  const Error error = error_of([&] { nccl::NcclEngine(library_, parts(control, milliseconds(1500))); });
  EXPECT_EQ(error.kind(), ErrorKind::kTimedOut);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("ncclCommInitRankConfig"), HasSubstr("within")));
  EXPECT_LT(executor_->now() - began, seconds(30));
  EXPECT_TRUE(control_->failure()) << "the other ranks are notified";
}

}  // namespace
}  // namespace torchspan::testing::collective_nccl_engine
