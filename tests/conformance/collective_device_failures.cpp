// What goes wrong with groups on devices: missing devices and libraries, devices that do not answer, ranks that
// disagree. Every rank gets an error that names the culprit.
#include <atomic>
#include <gmock/gmock.h>
#include <optional>
#include <utility>

#include <ATen/ATen.h>

#include "collective/device/device_backend.h"
#include "core/api/step_part.h"
#include "tests/conformance/collective_devices.h"
#include "tests/conformance/collective_world.h"

namespace torchspan::testing::collective_device_failures {
namespace {

using namespace collective;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Work on the stand-in device is unfinished for a long time, while this object lives.
struct SlowDevice {
  SlowDevice() { StandInStreams::get().reset(1 << 30); }
  ~SlowDevice() { StandInStreams::get().reset(); }
};

GroupOptions on_device(BackendKind kind, Duration timeout = seconds(60)) {
  return {.backend = kind, .device = stand_in(0), .timeout = timeout};
}
at::Tensor ones_there(std::int64_t size) { return at::ones({size}).to(stand_in(0)); }

/// What `body` throws on each of two ranks.
std::vector<std::string> errors_of(const std::function<void(CollectiveWorld::Rank)>& body) {
  CollectiveWorld world(2);
  std::vector<std::string> texts;
  for (const auto& failure : world.try_each([&](CollectiveWorld::Rank self) {
         std::exception_ptr failure;
         try {
           body(self);
         } catch (...) {
           failure = std::current_exception();
         }
         // The end of a rank must not be the error that the other sees.
         self.membership.barrier("test.end", {}, world.executor().deadline_in(seconds(60)));
         if (failure) std::rethrow_exception(failure);
       })) {
    texts.push_back(failure ? to_error(failure).what() : "nothing was thrown");
  }
  return texts;
}

Group make_with(CollectiveWorld::Rank self, const GroupOptions& options, const DeviceServices& services) {
  return make_group(std::shared_ptr<Runtime>(std::shared_ptr<void>(), &self.runtime), self.membership,
                    options, services);
}
std::vector<std::string> errors_of_making(const GroupOptions& options, const DeviceServices& services) {
  return errors_of([&](CollectiveWorld::Rank self) { make_with(self, options, services); });
}

TEST(DeviceGroups, SayThatNcclIsMissingAndWhatToDo) {
  DeviceServices services = stand_in_services(BackendKind::kNccl);
  services.nccl_library = "/nowhere/libnccl.so.2";
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kNccl), services),
              Each(AllOf(HasSubstr("unsupported"), HasSubstr("worker0"), HasSubstr("/nowhere/libnccl.so.2"),
                         HasSubstr("TORCHSPAN_NCCL_LIBRARY"), HasSubstr("kCudaIpc"))));
}

TEST(DeviceGroups, RefuseALibraryThatIsNotNcclAndAnOldOne) {
  DeviceServices services = stand_in_services(BackendKind::kNccl);
  services.nccl_library = fake_nccl_old();
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kNccl), services),
              Each(AllOf(HasSubstr("has no function ncclGetUniqueId"), HasSubstr("2.14 or later"))));
  const FakeNccl faults;
  faults.set("version", 20804);
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl)),
              Each(AllOf(HasSubstr("is NCCL 2.8.4"), HasSubstr("interrupted when a rank dies"))));
}

TEST(DeviceGroups, WithoutNcclOrWithASharedGpuUseSharedDeviceMemory) {
  for (const bool shared : {false, true}) {
    DeviceServices services = stand_in_services(BackendKind::kCudaIpc);
    if (!shared) services.nccl_library = "/nowhere/libnccl.so.2";
    EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                  const Group group = make_with(self, on_device(BackendKind::kAutomatic), services);
                  EXPECT_EQ(group.backend()->name(), "cuda_ipc");
                }),
                Each("nothing was thrown"));
  }
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group = make_with(self, on_device(BackendKind::kAutomatic),
                                              stand_in_services(BackendKind::kNccl));
                EXPECT_EQ(group.backend()->name(), "nccl");
              }),
              Each("nothing was thrown"));
}

TEST(DeviceGroups, NameTheRanksThatShareAGpuWhichNcclRefuses) {
  DeviceServices services = stand_in_services(BackendKind::kCudaIpc);
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kNccl), services),
              Each(AllOf(HasSubstr("worker0"), HasSubstr("worker1"), HasSubstr("share one GPU"),
                         HasSubstr("kCudaIpc"))));
}

TEST(DeviceGroups, NameADeviceThatDoesNotExist) {
  EXPECT_THAT(errors_of([](CollectiveWorld::Rank self) {
                GroupOptions options = on_device(BackendKind::kCudaIpc);
                if (self.rank == 1) options.device = stand_in(7);
                make_with(self, options, stand_in_services(BackendKind::kCudaIpc));
              }),
              Each(AllOf(HasSubstr("worker1"), HasSubstr("there is no privateuseone:7"),
                         HasSubstr("2 privateuseone devices"), HasSubstr("choose a smaller index"))));
}

TEST(DeviceGroups, WithoutADriverOrTheCudaHalfOfLibTorchSayWhatIsMissing) {
  if (c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
      c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0)
    GTEST_SKIP() << "there is a GPU";
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                GroupOptions options;
                options.device = c10::Device(c10::kCUDA, 0);
                Group::make(self.runtime, self.membership, options);
              }),
              Each(AllOf(HasSubstr("worker0"), HasSubstr("cuda:0"),
                         ::testing::AnyOf(HasSubstr("TORCHSPAN_CUDA=ON"), HasSubstr("nvidia-smi")))));
}

TEST(DeviceGroups, SayThatTorchSpanWasBuiltWithoutCudasRuntime) {
  DeviceServices services = stand_in_services(BackendKind::kCudaIpc);
  services.runtime = nullptr;
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kCudaIpc), services),
              Each(AllOf(HasSubstr("unsupported"), HasSubstr("worker0"), HasSubstr("privateuseone"),
                         HasSubstr("TORCHSPAN_CUDA=ON"))));
}

TEST(DeviceGroups, RefuseRanksWithAndWithoutADevice) {
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                GroupOptions options = on_device(BackendKind::kCudaIpc);
                if (self.rank == 1) options.device.reset();
                make_with(self, options, stand_in_services(BackendKind::kCudaIpc));
              }),
              Each(AllOf(HasSubstr("worker0"), HasSubstr("device privateuseone"), HasSubstr("worker1"),
                         HasSubstr("device none"), HasSubstr("GroupOptions::device"),
                         HasSubstr("backend kCudaIpc"), HasSubstr("network kEncrypted"))));
}

TEST(DeviceGroups, RefuseABackendForTheCpuAndADeviceBackendWithoutADevice) {
  EXPECT_THAT(errors_of_making(on_device(BackendKind::kSharedMemory), stand_in_services(BackendKind::kNccl)),
              Each(AllOf(HasSubstr("kAutomatic, kNccl, kCudaIpc or kC10d"))));
  EXPECT_THAT(errors_of([](CollectiveWorld::Rank self) {
                Group::make(self.runtime, self.membership, {.backend = BackendKind::kNccl});
              }),
              Each(HasSubstr("GroupOptions::device is not set")));
}

TEST(DeviceGroups, NameTheRankWhoseMemoryCannotBeMapped) {
  EXPECT_THAT(errors_of([](CollectiveWorld::Rank self) {
                DeviceServices services = stand_in_services(BackendKind::kCudaIpc);
                if (self.rank == 1)
                  services.runtime = std::make_shared<StandInRuntime>(true, "its compute mode forbids it");
                make_with(self, on_device(BackendKind::kCudaIpc), services);
              }),
              Each(AllOf(HasSubstr("rank 1"), HasSubstr("its compute mode forbids it"))));
}

/// As in two containers: each rank exports its memory, and rank 1 cannot open that of the other one.
TEST(DeviceGroups, NameTheRanksOfWhichOneCannotMapTheMemoryOfTheOther) {
  class Contained final : public StandInRuntime {
    std::shared_ptr<std::byte> open_memory(c10::Device, BytesView, std::size_t) const override {
      throw Error(ErrorKind::kUnsupported, "no such process here");
    }
  };
  EXPECT_THAT(errors_of([](CollectiveWorld::Rank self) {
                DeviceServices services = stand_in_services(BackendKind::kCudaIpc);
                if (self.rank == 1) services.runtime = std::make_shared<Contained>();
                make_with(self, on_device(BackendKind::kCudaIpc), services);
              }),
              Each(AllOf(HasSubstr("rank 1 cannot map the memory of rank 0"),
                         HasSubstr("no such process here"), HasSubstr("one container"), HasSubstr("kNccl"))));
}

TEST(DeviceGroups, NameRanksOfWhichOnePassesATensorOnTheCpu) {
  for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kCudaIpc}) {
    const auto errors = errors_of([&](CollectiveWorld::Rank self) {
      const Group group = make_with(self, on_device(kind), stand_in_services(kind));
      group.all_reduce(self.rank == 0 ? at::ones({3}) : ones_there(3)).wait();
    });
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("invalid"), HasSubstr("worker0"), HasSubstr("worker1"),
                                   HasSubstr("all_reduce(Float [3], sum)"))));
    EXPECT_THAT(errors[1], HasSubstr("all_reduce(Float [3], sum) on privateuseone"));
  }
}

TEST(DeviceGroups, NameThePartsOfAPipelinesStepThatDiffer) {
  for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kCudaIpc}) {
    const auto errors = errors_of([&](CollectiveWorld::Rank self) {
      const Group group = make_with(self, on_device(kind), stand_in_services(kind));
      const StepPartScope part({StepPart::Kind::kRepeatedForward, 1, self.rank, -1, 7});
      group.all_reduce(ones_there(3)).wait();
    });
    const std::string call =
        "all_reduce(Float [3], sum) on privateuseone in the repeated forward of micro-batch ";
    EXPECT_THAT(errors, Each(AllOf(HasSubstr("invalid"), HasSubstr(call + "0"), HasSubstr(call + "1"))));
  }
}

TEST(DeviceGroups, RefuseATensorOnAnotherDevice) {
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group = make_with(self, on_device(BackendKind::kCudaIpc),
                                              stand_in_services(BackendKind::kCudaIpc));
                group.all_reduce(at::ones({3}).to(stand_in(1))).wait();
              }),
              Each(AllOf(HasSubstr("all_reduce of a Float tensor [3] on privateuseone:1"),
                         HasSubstr("cuda_ipc"), HasSubstr("GroupOptions::device"))));
}

TEST(DeviceGroups, NameTensorsOfOneCallOnSeveralDevices) {
  const auto errors = errors_of([&](CollectiveWorld::Rank self) {
    const Group group =
        make_with(self, on_device(BackendKind::kCudaIpc), stand_in_services(BackendKind::kCudaIpc));
    const auto text_of = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const Error& error) {
        return error.what();
      }
      return "nothing was thrown";
    };
    const auto its_rank = HasSubstr("rank " + std::to_string(self.rank) + " of the group");
    EXPECT_THAT(text_of([&] {
                  static_cast<void>(group.all_to_all({ones_there(3), at::ones({3})}));
                }),
                AllOf(its_rank, HasSubstr("part 0 is on privateuseone"), HasSubstr("move all of them")));
    EXPECT_THAT(text_of([&] {
                  static_cast<void>(all_reduce_coalesced(group, {ones_there(3), at::ones({3})}));
                }),
                AllOf(its_rank, HasSubstr("Float on privateuseone"), HasSubstr("Float on cpu"),
                      HasSubstr("one call for each dtype and device")));
    group.all_reduce(ones_there(3)).wait();  // the group works
  });
  EXPECT_THAT(errors, Each("nothing was thrown"));
}

/// What a worker lists as waits of an operation on devices, without the announcement of its control group.
std::vector<std::string> listed_waits(const Runtime& runtime) {
  std::vector<std::string> listed;
  for (const OpenOperation& operation : runtime.spans.open()) {
    if (operation.kind != SpanKind::kWait || operation.name.starts_with("all_gather(Byte [")) continue;
    listed.push_back(operation.name + " number " + std::to_string(operation.link.id));
    EXPECT_TRUE(has_ranks(operation.link.part, std::vector<int>{0, 1}));
  }
  return listed;
}

/// Waits until `runtime` lists an operation; returns what it lists then.
std::vector<std::string> await_listed(CollectiveWorld& world, const Runtime& runtime) {
  std::vector<std::string> listed;
  const Deadline until = world.executor().deadline_in(seconds(30));
  while ((listed = listed_waits(runtime)).empty() && !until.passed(world.executor().now())) {
    world.executor().sleep(milliseconds(5));
  }
  return listed;
}

TEST(DeviceGroups, ListAnOperationThatWaitsForAnotherRank) {
  for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kCudaIpc}) {
    CollectiveWorld world(2);
    const auto failures = world.try_each([&](CollectiveWorld::Rank self) {
      const Group group = make_with(self, on_device(kind), stand_in_services(kind));
      group.all_reduce(ones_there(3)).wait();
      self.membership.barrier("test.first", {}, world.executor().deadline_in(seconds(60)));
      EXPECT_THAT(listed_waits(self.runtime), IsEmpty());
      Future<at::Tensor> second;
      if (self.rank == 0) {
        second = group.all_reduce(ones_there(4));  // does not block
        EXPECT_THAT(await_listed(world, self.runtime),
                    ElementsAre(AllOf(HasSubstr("all_reduce(Float [4], sum)"), HasSubstr("number 2"))));
      }
      self.membership.barrier("test.listed", {}, world.executor().deadline_in(seconds(60)));
      if (self.rank == 1) second = group.all_reduce(ones_there(4));
      second.wait();
      EXPECT_THAT(listed_waits(self.runtime), IsEmpty());
      self.membership.barrier("test.end", {}, world.executor().deadline_in(seconds(60)));
    });
    for (const auto& failure : failures) EXPECT_FALSE(failure) << to_error(failure).what();
  }
}

TEST(DeviceGroups, ListAnOperationThatTheDeviceDoesNotFinish) {
  CollectiveWorld world(2);
  const SlowDevice slow;
  const auto failures = world.try_each([&](CollectiveWorld::Rank self) {
    const Group group = make_with(self, on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl));
    const auto unfinished = group.all_reduce(ones_there(4));
    EXPECT_THAT(await_listed(world, self.runtime),
                ElementsAre(AllOf(HasSubstr("all_reduce(Float [4], sum)"), HasSubstr("number 1"))));
    self.membership.barrier("test.listed", {}, world.executor().deadline_in(seconds(60)));
    group.abort(Error(ErrorKind::kCancelled, "the test is over"));
    const Deadline until = world.executor().deadline_in(seconds(30));
    while (!listed_waits(self.runtime).empty() && !until.passed(world.executor().now())) {
      world.executor().sleep(milliseconds(5));
    }
    EXPECT_THAT(listed_waits(self.runtime), IsEmpty()) << "after the failure";
    self.membership.barrier("test.end", {}, world.executor().deadline_in(seconds(60)));
  });
  for (const auto& failure : failures) EXPECT_FALSE(failure) << to_error(failure).what();
}

TEST(DeviceGroups, AbortAnOperationThatNcclDoesNotEnd) {
  const FakeNccl faults;
  const int before = faults.aborted();
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group = make_with(self, on_device(BackendKind::kNccl, seconds(4)),
                                              stand_in_services(BackendKind::kNccl));
                group.all_reduce(ones_there(5)).wait();
                group.barrier();
                faults.set("stall", 1);
                EXPECT_THROW(group.all_reduce(ones_there(6)).wait(), Error);
                group.all_reduce(ones_there(7)).wait();
              }),
              Each(AllOf(HasSubstr("timed out"), HasSubstr("ncclAllReduce"), HasSubstr("[6], sum)"),
                         HasSubstr("call 2 of the group"))));
  EXPECT_GE(faults.aborted(), before + 2);
}

/// ncclCommDestroy waits until all ranks of the host end their communicators.
TEST(DeviceGroups, OverNcclCanBeLeftByOneRankWhileAnotherKeepsItsGroup) {
  const FakeNccl faults;
  const int before = faults.destroyed();
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                std::optional<Group> group =
                    make_with(self, on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl));
                group->all_reduce(ones_there(4)).synchronize();
                if (self.rank == 0) group.reset();
                self.membership.barrier("test.left", {}, Deadline::never());
              }),
              Each("nothing was thrown"));
  EXPECT_EQ(faults.destroyed(), before);
}

TEST(DeviceGroups, ReportAnErrorOfNcclToAllRanks) {
  const FakeNccl faults;
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group =
                    make_with(self, on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl));
                group.barrier();
                faults.set("refuse", 2);
                group.all_reduce(ones_there(6)).wait();
              }),
              Each(AllOf(HasSubstr("disconnected"), HasSubstr("ncclAllReduce failed in NCCL 2.28.9"),
                         HasSubstr("unhandled system error"))));
}

/// CUDA would make a context on the current device of each thread, which is device 0 here.
TEST(DeviceGroups, UseEventsOnTheirDeviceOnly) {
  for (const BackendKind kind : {BackendKind::kNccl, BackendKind::kCudaIpc}) {
    StandInStreams::get().reset();
    EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                  GroupOptions options = on_device(kind);
                  options.device = stand_in(1);
                  const Group group = make_with(self, options, stand_in_services(kind));
                  const at::Tensor sum = group.all_reduce(at::ones({3}).to(stand_in(1))).wait();
                  EXPECT_TRUE(at::equal(sum.cpu(), at::full({3}, 2.0F)));
                }),
                Each("nothing was thrown"));
    EXPECT_EQ(StandInStreams::get().stray_event_calls(), 0u);
  }
}

/// The operation is launched, so wait() has succeeded; whoever takes the result later gets the failure.
TEST(DeviceGroups, FailTheResultsOfADeviceThatDoesNotFinish) {
  const SlowDevice slow;
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group = make_with(self, on_device(BackendKind::kNccl, seconds(4)),
                                              stand_in_services(BackendKind::kNccl));
                const at::Tensor mine = ones_there(6);
                const auto result = group.all_reduce(mine);
                result.wait();
                EXPECT_THROW(result.synchronize(), Error);
                EXPECT_THROW(result.wait(), Error);
                group.all_reduce(mine).wait();
              }),
              Each(AllOf(HasSubstr("timed out"), HasSubstr("has not finished it on privateuseone:0"),
                         HasSubstr("[6], sum)"))));
}

TEST(DeviceGroups, ReportAFailureThatNcclFindsAfterTheLaunch) {
  const FakeNccl faults;
  const SlowDevice slow;
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group =
                    make_with(self, on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl));
                const at::Tensor mine = ones_there(6);
                const auto result = group.all_reduce(mine);
                result.wait();
                group.barrier();
                faults.set("async_error", 6);
                result.synchronize();
              }),
              Each(AllOf(HasSubstr("disconnected"), HasSubstr("remote process exited"))));
}

TEST(DeviceGroups, AbortOnOneRankEndsLaunchedWorkOfTheOthers) {
  const SlowDevice slow;
  EXPECT_THAT(errors_of([&](CollectiveWorld::Rank self) {
                const Group group =
                    make_with(self, on_device(BackendKind::kNccl), stand_in_services(BackendKind::kNccl));
                const at::Tensor mine = ones_there(6);
                const auto result = group.all_reduce(mine);
                result.wait();
                if (self.rank == 0) group.abort(Error(ErrorKind::kCancelled, "the trainer gave up"));
                result.synchronize();
              }),
              Each(AllOf(HasSubstr("cancelled"), HasSubstr("worker0"), HasSubstr("the trainer gave up"))));
}

/// An engine whose first call fails while work that uses its tensors may still run, until abort() ends it.
class FailingEngine final : public DeviceEngine {
 public:
  explicit FailingEngine(std::atomic<int>& freed) : freed_(freed) {}

  std::string name() const override { return "failing"; }
  bool reduces(at::ScalarType, ReduceOp reduction) const override { return reduction == kSum; }
  void all_reduce(const at::Tensor& tensor, ReduceOp) override { fail({tensor}); }
  void reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp) override {
    fail({tensor, part});
  }
  void broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>&) override { fail(tensors); }
  void all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) override {
    std::vector<at::Tensor> all = sent;
    all.insert(all.end(), received.begin(), received.end());
    fail(all);
  }
  void abort() noexcept override {
    for (const auto& storage : used_) freed_ += storage.expired() ? 1 : 0;
    used_.clear();
  }

 private:
  void fail(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) used_.push_back(tensor.storage().getWeakStorageImpl());
    throw Error(ErrorKind::kDisconnected, "the other rank is gone");
  }

  std::atomic<int>& freed_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> used_;
};

TEST(DeviceGroups, KeepTheTensorsOfWorkThatFailsUntilItIsAborted) {
  const std::vector<std::pair<std::string, std::function<void(const Group&)>>> calls{
      {"a reduction of the engine", [](const Group& group) { group.all_reduce(ones_there(8)).wait(); }},
      {"another reduction", [](const Group& group) { group.all_reduce(ones_there(8), kMax).wait(); }},
      {"a part of one", [](const Group& group) { group.reduce_scatter(ones_there(8)).wait(); }},
      {"a part of another", [](const Group& group) { group.reduce_scatter(ones_there(8), kMax).wait(); }},
      {"all_gather", [](const Group& group) { group.all_gather(ones_there(8)).wait(); }},
      {"broadcast", [](const Group& group) { group.broadcast(ones_there(8), 0).wait(); }},
      {"all_to_all", [](const Group& group) {
         group.all_to_all({ones_there(8), ones_there(8)}).wait();
       }}};
  for (const auto& each : calls) {
    std::atomic<int> freed{0};
    EXPECT_THAT(
        errors_of([&](CollectiveWorld::Rank self) {
          auto control =
              Group::make(self.runtime, self.membership, {.backend = BackendKind::kSharedMemory}).backend();
          const Group group(DeviceBackend::make(
              std::move(control),
              {.engine = [&](const EngineParts&) { return std::make_unique<FailingEngine>(freed); },
               .runtime = std::make_shared<StandInRuntime>(),
               .queue = {.device = stand_in(0), .members = {.names = {"worker0", "worker1"}}}}));
          each.second(group);
        }),
        Each(HasSubstr("the other rank is gone")))
        << each.first;
    EXPECT_EQ(freed, 0) << each.first;
  }
}

}  // namespace
}  // namespace torchspan::testing::collective_device_failures
