// A rank dies in every phase of an operation over shared memory: at a chosen access to its tensor, whose
// pages are protected so that the access ends the process. src/collective/shm/shm_algorithms.cpp shows which
// access belongs to which phase.
#include <csignal>
#include <sys/mman.h>
#include <unistd.h>

#include <ATen/ATen.h>

#include "tests/conformance/collective_process.h"

namespace torchspan::testing {
namespace {

using namespace collective;
using std::chrono::seconds;

constexpr int kRanks = 3;
constexpr int kDiedAsPlanned = 77, kDiedOtherwise = 78;
constexpr std::size_t kPage = 4096;
/// One chunk, for any chunk size, so that each rank's slice is about a third of it.
constexpr std::size_t kChunk = std::size_t{256} << 10;
constexpr std::size_t kManyChunks = std::size_t{8} << 20;

/// The bytes [from, to) of one of the victim's tensors; an access that is not allowed there ends its process.
struct Trap {
  std::size_t from = 0, to = 0;
  int allowed = PROT_NONE;
};
void set(const Trap& trap, const at::Tensor& tensor) {
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t begin = (address + trap.from + kPage - 1) / kPage * kPage;
  const std::uintptr_t end = (address + trap.to) / kPage * kPage;
  if (mprotect(reinterpret_cast<void*>(begin), end - begin, trap.allowed) != 0) _exit(kDiedOtherwise);
}
/// In this rank's memory, on separate pages, with the values 1 + rank.
at::Tensor private_tensor(const Group& group, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "there is memory");
  const auto count = static_cast<std::int64_t>(bytes / sizeof(float));
  return at::from_blob(memory, {count}, at::kFloat).fill_(1 + group.rank());
}

void require_all(const at::Tensor& tensor, double value) {
  require((tensor == value).all().item<bool>(), "a result of an operation that succeeded");
}

/// The operation that all ranks repeat, and where the victim's tensor is protected.
struct Phase {
  std::string name;
  std::size_t bytes = kChunk;
  bool shared = false;
  Trap trap = {};
  std::function<void(const Group&, const at::Tensor&)> call = {};
};

/// All operations can be repeated over their own results, so no other code writes to the tensors in between.
void reduce(const Group& group, const at::Tensor& mine) {
  group.all_reduce(mine, kMax).wait();
  require_all(mine, kRanks);
}
void scatter(const Group& group, const at::Tensor& mine) {
  const at::Tensor part = group.reduce_scatter(mine.view({kRanks, -1}), kMax).wait();
  require_all(part, kRanks);
}
void gather(const Group& group, const at::Tensor& mine) {
  const auto all = group.all_gather(mine).wait();
  for (int rank = 0; rank < kRanks; ++rank) require_all(all[static_cast<std::size_t>(rank)], 1 + rank);
}
void send(const Group& group, const at::Tensor& mine) {
  const auto got = group.all_to_all({mine, mine, mine}).wait();
  for (int rank = 0; rank < kRanks; ++rank) require_all(got[static_cast<std::size_t>(rank)], 1 + rank);
}
void take_from_first(const Group& group, const at::Tensor& mine) {
  group.broadcast(mine, 0).wait();
  require_all(mine, 1);
}
void take_from_victim(const Group& group, const at::Tensor& mine) {
  group.broadcast(mine, kVictim).wait();
  require_all(mine, 1 + kVictim);
}
/// The victim announces its call, with a small tensor, and dies.
void call_and_exit(const Group& group, const at::Tensor& mine) {
  const auto done = group.all_reduce(mine.narrow(0, 0, 100), kMax);
  if (group.rank() == kVictim) _exit(kDiedAsPlanned);
  done.wait();
  require_all(mine.narrow(0, 0, 100), kRanks);
}
void go(const Group& group, const at::Tensor& mine) {
  if (group.rank() == kVictim) _exit(kDiedAsPlanned);
  reduce(group, mine);
}

/// The victim, rank 1 of 3, reduces the middle third of a chunk and stages the rest.
std::vector<Phase> phases() {
  constexpr std::size_t kMiddle = kChunk * 2 / 5, kMiddleEnd = kChunk * 3 / 5, kAfterMiddle = kChunk * 3 / 4;
  constexpr std::size_t kEnd = kManyChunks;
  return {
      {.name = "BeforeItEnters", .call = go},
      {.name = "AfterItsCallIsSent", .call = call_and_exit},
      {.name = "WhileItStages", .trap = {kAfterMiddle, kChunk, PROT_NONE}, .call = reduce},
      {.name = "AfterItHasStaged", .trap = {kMiddle, kMiddleEnd, PROT_NONE}, .call = reduce},
      {.name = "WhileItReduces", .trap = {kMiddle, kMiddleEnd, PROT_READ}, .call = reduce},
      {.name = "WhileItTakesResults", .trap = {kAfterMiddle, kChunk, PROT_READ}, .call = reduce},
      {.name = "AfterSomeChunks", .bytes = kEnd, .trap = {kEnd / 2, kEnd, PROT_NONE}, .call = reduce},
      {.name = "WhileItWritesToSharedTensors",
       .bytes = kEnd,
       .shared = true,
       .trap = {kEnd * 2 / 5, kEnd * 3 / 5, PROT_READ},
       .call = reduce},
      {.name = "WhileItReadsSharedTensorsToScatter",
       .bytes = kRanks * kChunk,
       .shared = true,
       .trap = {kChunk + kPage, 2 * kChunk - kPage, PROT_NONE},
       .call = scatter},
      {.name = "WhileItStagesToScatter",
       .bytes = kRanks * kChunk,
       .trap = {2 * kChunk + kPage, 3 * kChunk, PROT_NONE},
       .call = scatter},
      {.name = "WhileItReducesWhatWasScattered",
       .bytes = kRanks * kChunk,
       .trap = {kChunk + kPage, 2 * kChunk - kPage, PROT_NONE},
       .call = scatter},
      {.name = "WhileItStagesForAGather", .bytes = kEnd, .trap = {kEnd / 2, kEnd, PROT_NONE}, .call = gather},
      {.name = "WhileItStagesForAnExchange",
       .bytes = kEnd,
       .trap = {kEnd / 2, kEnd, PROT_NONE},
       .call = send},
      {.name = "WhileItBroadcasts",
       .bytes = kEnd,
       .trap = {kEnd / 2, kEnd, PROT_NONE},
       .call = take_from_victim},
      {.name = "WhileItTakesABroadcast",
       .bytes = kEnd,
       .trap = {kEnd / 2, kEnd, PROT_READ},
       .call = take_from_first},
  };
}

void die_of_a_trap(int, siginfo_t* info, void*) {
  _exit(info->si_code == SEGV_ACCERR ? kDiedAsPlanned : kDiedOtherwise);
}

void run(const Phase& phase) {
  with_group(shared_memory(), [&](Group& group, Executor&) {
    group.all_reduce(at::ones({100})).wait();
    const auto count = static_cast<std::int64_t>(phase.bytes / sizeof(float));
    const at::Tensor mine = phase.shared ? group.allocate({count}, at::kFloat).fill_(1 + group.rank())
                                         : private_tensor(group, phase.bytes);
    if (group.rank() == kVictim) {
      struct sigaction action {};
      action.sa_sigaction = die_of_a_trap;
      action.sa_flags = SA_SIGINFO;
      sigaction(SIGSEGV, &action, nullptr);
      if (phase.trap.to > 0) set(phase.trap, mine);
    }
    // The operation in which it died may already have all that it needs from the victim; the next one cannot.
    expect_error(ErrorKind::kDisconnected, {"worker1", "rank 1", "is gone"}, [&] {
      while (true) phase.call(group, mine);
    });
    expect_error(ErrorKind::kDisconnected, {"worker1", "is gone"}, [&] { group.barrier(); });
  });
}

class CollectivePhases : public ::testing::TestWithParam<Phase> {};
INSTANTIATE_TEST_SUITE_P(ARankDies, CollectivePhases, ::testing::ValuesIn(phases()),
                         [](const auto& info) { return info.param.name; });

// peer: c10d testSIGKILLException
TEST_P(CollectivePhases, AndTheOthersNameItAndDoNotHang) {
  ProcessWorld world(kRanks);
  world.start_all("phase_" + GetParam().name);
  for (const int rank : {kVictim, 0, 2}) {
    ASSERT_TRUE(world.process(rank).wait(world.executor(), seconds(60))) << "rank " << rank << " still runs";
    EXPECT_EQ(world.process(rank).exit_code(), rank == kVictim ? kDiedAsPlanned : 0)
        << "rank " << rank << ":\n"
        << world.process(rank).output();
  }
}

}  // namespace

std::map<std::string, Scenario> phase_scenarios() {
  std::map<std::string, Scenario> scenarios;
  for (const Phase& phase : phases()) scenarios["phase_" + phase.name] = [phase] { run(phase); };
  return scenarios;
}

}  // namespace torchspan::testing
