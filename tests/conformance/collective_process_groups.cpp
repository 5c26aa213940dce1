// Groups on devices over a LibTorch process group that the program makes: a double of one, whose work travels through
// a group for the CPU.
#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <torchspan/collective/c10d.h>
#include <torchspan/core/log.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/c10d/c10d_engine.h"
#include "collective/single.h"
#include "device/api/torch_version.h"
#include "tests/conformance/collective_devices.h"
#include "tests/conformance/collective_world.h"
#include "tests/support/errors.h"

namespace torchspan::testing::collective_process_groups {
namespace {

using namespace collective;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

/// How often a process group or its work was aborted: releases of LibTorch differ in which of the two it is.
using Aborts = std::shared_ptr<std::atomic<int>>;

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(Aborts aborts) : aborts_(std::move(aborts)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void abort() override { ++*aborts_; }

 private:
  const Aborts aborts_;
};

class DoubleGroup final : public c10d::ProcessGroup {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  explicit DoubleGroup(Group cpu, Aborts aborts = std::make_shared<std::atomic<int>>(0))
      : ProcessGroup(cpu.rank(), cpu.size()), cpu_(std::move(cpu)), aborts_(std::move(aborts)) {}

  const std::string getBackendName() const override { return "double"; }
#if TORCHSPAN_LIBTORCH_AT_LEAST(2, 7)  // before, only work can be aborted
  void abort() override { ++*aborts_; }
#endif
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    tensors.at(0).copy_(cpu_.all_reduce(tensors.at(0).cpu(), op_of(options.reduceOp)).wait());
    return done();
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    tensors.at(0).copy_(cpu_.broadcast(tensors.at(0).cpu(), static_cast<int>(options.rootRank)).wait());
    return done();
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Tensors rows;
    for (const at::Tensor& row : inputs.at(0)) rows.push_back(row.cpu());
    const at::Tensor all = cpu_.all_reduce(at::stack(rows), op_of(options.reduceOp)).wait();
    outputs.at(0).copy_(all[getRank()]);
    return done();
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    const Tensors all = cpu_.all_gather(inputs.at(0).cpu()).wait();
    for (std::size_t i = 0; i < all.size(); ++i) outputs.at(0).at(i).copy_(all[i]);
    return done();
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    Tensors parts;
    for (const at::Tensor& part : inputs) parts.push_back(part.cpu());
    const Tensors received = cpu_.all_to_all(parts).wait();
    for (std::size_t i = 0; i < received.size(); ++i) outputs[i].copy_(received[i].view(outputs[i].sizes()));
    return done();
  }

 private:
  WorkPtr done() const { return c10::make_intrusive<DoneWork>(aborts_); }
  static ReduceOp op_of(const c10d::ReduceOp& operation) {
    if (operation == c10d::ReduceOp::MIN) return kMin;
    if (operation == c10d::ReduceOp::MAX) return kMax;
    return operation == c10d::ReduceOp::PRODUCT ? kProduct : kSum;
  }
  Group cpu_;
  const Aborts aborts_;
};

GroupOptions options_of(CollectiveWorld::Rank self,
                        const Aborts& aborts = std::make_shared<std::atomic<int>>(0)) {
  GroupOptions options{.backend = BackendKind::kC10d, .device = stand_in(0), .timeout = seconds(60)};
  options.process_group = [self, aborts](const std::vector<int>& ranks,
                                         int rank) -> c10::intrusive_ptr<c10d::ProcessGroup> {
    const Group cpu = Group::make(self.runtime, self.membership, {.ranks = ranks, .timeout = seconds(60)});
    EXPECT_EQ(cpu.rank(), rank);
    return c10::make_intrusive<DoubleGroup>(cpu, aborts);
  };
  return options;
}

at::Tensor there(const at::Tensor& tensor) { return tensor.to(stand_in(0)); }
void expect_equal(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_EQ(got.device(), stand_in(0));
  EXPECT_TRUE(at::equal(got.cpu(), wanted)) << got.cpu() << wanted;
}

void use(Group& group) {
  const int size = group.size(), rank = group.rank();
  const auto mine = [&](int of, at::ScalarType dtype) {
    return at::arange(1, 7).mul(of + 1).view({2, 3}).to(dtype);
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kInt, at::kLong}) {
    at::Tensor sum = at::zeros({2, 3}, dtype), most = mine(size - 1, dtype);
    for (int of = 0; of < size; ++of) sum += mine(of, dtype);
    expect_equal(group.all_reduce(there(mine(rank, dtype)), kSum).wait(), sum);
    expect_equal(group.all_reduce(there(mine(rank, dtype)), kMax).wait(), most);
    expect_equal(group.broadcast(there(mine(rank, dtype)), 1).wait(), mine(1, dtype));
  }
  at::Tensor mean = at::zeros({2, 3});
  for (int of = 0; of < size; ++of) mean += mine(of, at::kFloat);
  expect_equal(group.all_reduce(there(mine(rank, at::kFloat)), kAvg).wait(), mean / size);
  const at::Tensor rows = at::arange(2 * size, at::kDouble) * (rank + 1);
  expect_equal(group.reduce_scatter(there(rows), kSum).wait(),
               at::arange(2 * size, at::kDouble).narrow(0, 2 * rank, 2) * (size * (size + 1) / 2));
  const Tensors gathered = group.all_gather(there(at::full({rank + 1}, rank, at::kInt))).wait();
  for (int of = 0; of < size; ++of)
    expect_equal(gathered[static_cast<std::size_t>(of)], at::full({of + 1}, of, at::kInt));
  // Process groups without bitwise reductions exist: every rank reduces the others' tensors itself.
  const at::Tensor bits = group.all_reduce(there(at::full({3}, 1 << rank, at::kInt) + 64), kBitOr).wait();
  expect_equal(bits, at::full({3}, 64 + (1 << size) - 1, at::kInt));
  const at::Tensor flags = group.all_reduce(there(at::full({3}, rank == 1, at::kBool)), kMax).wait();
  expect_equal(flags, at::ones({3}, at::kBool));
}

/// A backend over a process group of the program.
std::shared_ptr<Backend> backend_of(CollectiveWorld::Rank self, C10dOptions options) {
  const Group cpu = Group::make(self.runtime, self.membership, {.timeout = seconds(60)});
  return make_c10d_backend(self.runtime, c10::make_intrusive<DoubleGroup>(cpu), std::move(options));
}

TEST(ProcessGroups, AreBackendsThatSplitOnlyIfTheProgramSaysHow) {
  CollectiveWorld world(2);
  for (const auto& failure : world.try_each([](CollectiveWorld::Rank self) {
         Group group(backend_of(self, {.compare_calls = false}));
         EXPECT_EQ(group.rank(), self.rank);
         EXPECT_TRUE(at::equal(group.all_reduce(at::ones({3}), kSum).wait(), at::full({3}, 2.0F)));
         const Tensors all = group.all_gather(at::full({2}, self.rank)).wait();
         EXPECT_TRUE(at::equal(all.at(1), at::full({2}, 1)));
         EXPECT_THAT(error_text([&] { static_cast<void>(group.split(0, self.rank)); }),
                     HasSubstr("C10dOptions::split"));
       })) {
    if (failure) ADD_FAILURE() << to_error(failure).what();
  }
}

TEST(ProcessGroups, NameTheRanksThatMakeDifferentCalls) {
  CollectiveWorld world(2);
  for (const auto& failure : world.try_each([](CollectiveWorld::Rank self) {
         Group group(backend_of(self, {.peers = {"trainer A", "trainer B"}}));
         if (self.rank == 0) group.all_reduce(at::ones({3}), kSum).wait();
         if (self.rank == 1) group.broadcast(at::ones({3}), 0).wait();
       })) {
    ASSERT_TRUE(failure);
    EXPECT_THAT(to_error(failure).what(),
                AllOf(HasSubstr("trainer A called all_reduce"), HasSubstr("trainer B called broadcast")));
  }
}

TEST(DeviceProcessGroups, MoveAndReduceTensorsOfTheDevice) {
  StandInStreams::get().reset();
  for (const int ranks : {2, 3}) {
    CollectiveWorld world(ranks);
    for (const auto& failure : world.try_each([](CollectiveWorld::Rank self) {
           Group group = Group::make(self.runtime, self.membership, options_of(self));
           EXPECT_EQ(group.backend()->name(), "c10d");
           use(group);
           EXPECT_TRUE(at::equal(group.all_reduce(at::ones({2}), kSum).wait(),
                                 at::full({2}, double(group.size()), at::kFloat)));
         })) {
      if (failure) ADD_FAILURE() << to_error(failure).what();
    }
  }
  EXPECT_THAT(StandInStreams::get().take_races(), ::testing::IsEmpty());
}

TEST(DeviceProcessGroups, PartsOfAGroupHaveTheirOwn) {
  CollectiveWorld world(4);
  for (const auto& failure : world.try_each([](CollectiveWorld::Rank self) {
         const Group group = Group::make(self.runtime, self.membership, options_of(self));
         Group part = group.split(self.rank % 2, self.rank);
         EXPECT_EQ(part.ranks(), (std::vector<int>{self.rank % 2, self.rank % 2 + 2}));
         use(part);
       })) {
    if (failure) ADD_FAILURE() << to_error(failure).what();
  }
}

/// kAvg: the division after the process group's work is what the device does not finish.
TEST(DeviceProcessGroups, AreAbortedOnAllRanksWhenTheGroupFails) {
  StandInStreams::get().reset(/*polls=*/1 << 30);
  const auto aborts = std::make_shared<std::atomic<int>>(0);
  CollectiveWorld world(2);
  for (const auto& failure : world.try_each([&](CollectiveWorld::Rank self) {
         const Group group = Group::make(self.runtime, self.membership, options_of(self, aborts));
         const at::Tensor mine = there(at::ones({3}));
         const auto result = group.all_reduce(mine, kAvg);
         result.wait();
         self.membership.barrier("test.launched", {}, world.executor().deadline_in(seconds(60)));
         EXPECT_EQ(aborts->load(), 0);
         self.membership.barrier("test.not_aborted", {}, world.executor().deadline_in(seconds(60)));
         if (self.rank == 0) group.abort(Error(ErrorKind::kCancelled, "the trainer gave up"));
         EXPECT_THAT(error_text([&] { result.synchronize(); }), HasSubstr("the trainer gave up"));
         self.membership.barrier("test.end", {}, world.executor().deadline_in(seconds(60)));
       })) {
    if (failure) ADD_FAILURE() << to_error(failure).what();
  }
  EXPECT_EQ(aborts->load(), 2) << "once on each rank";
  StandInStreams::get().reset();
}

TEST(C10dEngines, AbortTheirProcessGroupOnceAndThenThrow) {
  const std::unique_ptr<Executor> executor = make_executor();
  const auto runtime = std::make_shared<Runtime>(*executor, "worker0", LogLevel::kOff);
  const std::shared_ptr<Backend> control = SingleBackend::make(0, runtime, nullptr);
  const auto aborts = std::make_shared<std::atomic<int>>(0);
  const auto engine = C10dEngine::make(
      [&](const std::vector<int>&, int) -> c10::intrusive_ptr<c10d::ProcessGroup> {
        return c10::make_intrusive<DoubleGroup>(Group(control), aborts);
      },
      {.control = control,
       .device = stand_in(0),
       .runtime = std::make_shared<StandInRuntime>(),
       .failure = std::make_shared<GroupFailure>(),
       .departed = [] { return std::nullopt; },
       .timeout = seconds(60)});
  const at::Tensor tensor = there(at::ones({3}));
  engine->all_reduce(tensor, kSum);
  EXPECT_EQ(aborts->load(), 0);
  engine->abort();
  engine->abort();
  EXPECT_EQ(aborts->load(), 1);
  const std::vector<std::function<void()>> calls{
      [&] { engine->all_reduce(tensor, kSum); }, [&] { engine->reduce_scatter(tensor, tensor, kSum); },
      [&] { engine->broadcast({tensor}, {0}); }, [&] { engine->all_to_all({tensor}, {tensor}); }};
  for (const auto& call : calls) {
    const Error error = error_of(call);
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled);
    EXPECT_THAT(error.what(), HasSubstr("was aborted"));
  }
}

/// Every rank gets the error of the one whose part fails.
TEST(DeviceProcessGroups, NameTheRankWhosePartFails) {
  const auto errors_with = [](const std::function<void(GroupOptions&)>& change) {
    CollectiveWorld world(2);
    std::vector<std::string> texts;
    for (const auto& failure : world.try_each([&](CollectiveWorld::Rank self) {
           GroupOptions options = options_of(self);
           options.process_group = [](const auto&, int) { return c10::intrusive_ptr<c10d::ProcessGroup>(); };
           if (self.rank == 1) change(options);
           std::exception_ptr failure;
           try {
             Group::make(self.runtime, self.membership, options);
           } catch (...) {
             failure = std::current_exception();
           }
           self.membership.barrier("test.end", {}, world.executor().deadline_in(seconds(60)));
           if (failure) std::rethrow_exception(failure);
         })) {
      texts.push_back(failure ? to_error(failure).what() : "nothing was thrown");
    }
    return texts;
  };
  EXPECT_THAT(errors_with([](GroupOptions&) {}),
              Each(AllOf(HasSubstr("process_group of rank 0"), HasSubstr("returned null"))));
  EXPECT_THAT(
      errors_with([](GroupOptions& options) { options.process_group = nullptr; }),
      Each(AllOf(HasSubstr("worker1"), HasSubstr("GroupOptions::process_group"), HasSubstr("not set"))));
}

}  // namespace
}  // namespace torchspan::testing::collective_process_groups
