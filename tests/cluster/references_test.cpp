// References between real processes: nothing leaks or dangles when workers are killed at any moment, and all
// memory is freed.
#include <atomic>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <malloc.h>
#include <random>

#include <ATen/core/ivalue.h>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/rpc/worker.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"
#include "tests/support/environment.h"
#include "tests/support/memory.h"

namespace torchspan::references_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::expect_all_end_well;
using testing::number_from;
using testing::ProcessWorld;
using testing::require;

/// The references that this process holds, and the values that it made and destroyed.
struct Books;
/// A value that counts its instances and may hold a reference.
class Tracked {
 public:
  explicit Tracked(Books& books, RRef<Tracked> inner = {});
  Tracked(Tracked&& other) noexcept
      : books_(std::exchange(other.books_, nullptr)), inner_(std::move(other.inner_)) {}
  ~Tracked();
  std::int64_t number() const { return 35; }

 private:
  Books* books_;
  RRef<Tracked> inner_;
};

struct Books : rpc::Extension {
  void attach(rpc::Registrar&) override {}
  void put(RRef<Tracked> rref) {
    MutexLock lock(mutex);
    held.push_back(std::move(rref));
  }
  /// Returns one of the held references, or an empty one; with `take` this process drops it.
  RRef<Tracked> draw(std::uint64_t number, bool take = false) {
    MutexLock lock(mutex);
    if (held.empty()) return {};
    auto& chosen = held[number % held.size()];
    if (!take) return chosen;
    RRef<Tracked> taken = std::exchange(chosen, std::move(held.back()));
    held.pop_back();
    return taken;
  }
  void clear() {
    std::vector<RRef<Tracked>> dropped;
    MutexLock lock(mutex);
    dropped.swap(held);
  }

  std::atomic<std::int64_t> made{0}, ended{0};
  Mutex mutex;
  std::vector<RRef<Tracked>> held TORCHSPAN_GUARDED_BY(mutex);
};

Tracked::Tracked(Books& books, RRef<Tracked> inner) : books_(&books), inner_(std::move(inner)) {
  ++books.made;
}
Tracked::~Tracked() {
  if (books_ != nullptr) ++books_->ended;
}

Books& books_of(const Worker& worker) { return worker.extension<Books>(); }
Tracked make(Worker& worker) { return Tracked(books_of(worker)); }
Tracked make_around(Worker& worker, const RRef<Tracked>& inner) { return Tracked(books_of(worker), inner); }
void keep(Worker& worker, const RRef<Tracked>& rref) { books_of(worker).put(rref); }
void keep_all(Worker& worker, const std::vector<RRef<Tracked>>& rrefs) {
  for (const auto& rref : rrefs) books_of(worker).put(rref);
}
void drop_all(Worker& worker) { books_of(worker).clear(); }
RRef<Tracked> give(Worker& worker, std::int64_t number) {
  return books_of(worker).draw(static_cast<std::uint64_t>(number));
}
/// Passed from worker to worker; the last one keeps it.
void pass_on(Worker& worker, const RRef<Tracked>& rref, std::int64_t hops);

constexpr Function<make> kMake{"make"};
constexpr Function<make_around> kMakeAround{"make_around"};
constexpr Function<keep> kKeep{"keep"};
constexpr Function<keep_all> kKeepAll{"keep_all"};
constexpr Function<drop_all> kDropAll{"drop_all"};
constexpr Function<give> kGive{"give"};
constexpr Function<pass_on> kPassOn{"pass_on"};
constexpr Function<&Tracked::number> kNumber{"Tracked.number"};

void pass_on(Worker& worker, const RRef<Tracked>& rref, std::int64_t hops) {
  if (hops == 0) return keep(worker, rref);
  const auto next = (worker.rank() + static_cast<std::uint32_t>(hops)) % worker.world_size();
  worker.rpc_sync(next, kPassOn, rref, hops - 1);
}

std::unique_ptr<Session> make_session() {
  std::vector<std::unique_ptr<rpc::Extension>> extensions;
  extensions.push_back(std::make_unique<Books>());
  return std::make_unique<Session>(
      WorkerOptions::from_env(),
      FunctionTable().add(kMake, kMakeAround, kKeep, kKeepAll, kDropAll, kGive, kPassOn, kNumber),
      std::move(extensions));
}

/// Whether a failed call failed because a worker died: the callee, one further along its chain, or one during
/// the creation of a value that it uses.
bool is_worker_loss(const Error& error) {
  if (error.kind() == ErrorKind::kDisconnected) return true;
  if (error.kind() != ErrorKind::kRemoteFailure && error.kind() != ErrorKind::kCancelled) return false;
  const std::string text = error.what();
  const auto says = [&](const char* reason) { return text.find(reason) != std::string::npos; };
  return says("disconnected") || says("died") || says("process ended");
}

/// One random action with references, as programs do them.
void act(Worker& worker, std::mt19937_64& random) {
  Books& books = books_of(worker);
  const auto other = static_cast<std::uint32_t>(random() % worker.world_size());
  const RRef<Tracked> chosen = books.draw(random());
  const std::uint64_t what = random() % 8;
  if (what == 0 || !chosen.valid()) return books.put(worker.remote(other, kMake));
  switch (what) {
    case 1:
      return books.put(worker.remote(other, kMakeAround, chosen));
    case 2:
      return books.put(RRef<Tracked>(worker, Tracked(books, chosen)));
    case 3:
      return worker.rpc_sync(other, kKeep, chosen);
    case 4:
      return worker.rpc_sync(other, kPassOn, chosen, static_cast<std::int64_t>(random() % 4));
    case 5:
      if (auto given = worker.rpc_sync(other, kGive, static_cast<std::int64_t>(random() >> 8)); given.valid())
        books.put(std::move(given));
      return;
    case 6:
      return require(chosen.rpc_sync(kNumber) == 35, "the value is whole");
    default:
      for (int i = 0; i < 3; ++i) books.draw(random(), true);
  }
}

/// Waits until all referenced values are destroyed and no message about them is pending.
void wait_until_empty(Worker& worker) {
  const Books& books = books_of(worker);
  const auto deadline = worker.runtime().executor.deadline_in(seconds(30));
  for (;;) {
    const auto debug = worker.debug();
    const auto& counts = debug.references;
    const std::size_t left = counts.owners + counts.forks + counts.pending_users + counts.pending_children +
                             debug.pending.size() + debug.serving.size();
    if (left == 0 && books.made == books.ended && worker.debug().rrefs().empty()) return;
    if (deadline.passed(worker.runtime().executor.now()))
      throw std::runtime_error(
          fmt::format("{} values made, {} ended; {}", books.made.load(), books.ended.load(), debug.str()));
    worker.runtime().executor.sleep(milliseconds(5));
  }
}

constexpr int kWorkers = 5;
constexpr Duration kTraffic = milliseconds(1500);

/// All workers act at random while two are killed; in the end the others' tables must be empty.
void survive() {
  const std::uint64_t seed = number_from("TEST_SEED", std::uint64_t{0});
  auto session = make_session();
  Worker& worker = session->worker();
  Executor& executor = session->runtime().executor;
  std::mt19937_64 plan(seed);
  const int first = 1 + static_cast<int>(plan() % (kWorkers - 1));
  const int second = 1 + (first + static_cast<int>(plan() % (kWorkers - 2))) % (kWorkers - 1);
  std::vector<std::string> survivors;
  Thread killer;
  for (int rank = 0; rank < kWorkers; ++rank) {
    const Duration moment = std::chrono::microseconds(50'000 + plan() % 1'000'000);
    if (rank != first && rank != second) {
      survivors.push_back(worker.info(rank).name);
    } else if (rank == static_cast<int>(worker.rank())) {
      killer = executor.spawn("killer", [&executor, moment] {
        executor.sleep(moment);
        ::kill(getpid(), SIGKILL);
      });
    }
  }
  std::vector<Thread> threads;
  std::atomic<int> unexpected{0};
  const auto end = executor.deadline_in(kTraffic);
  for (std::uint64_t actor = 0; actor < 2; ++actor) {
    threads.push_back(executor.spawn("actor", [&, actor] {
      std::mt19937_64 random(seed * 100 + worker.rank() * 10 + actor);
      while (!end.passed(executor.now())) {
        try {
          act(worker, random);
        } catch (const Error& error) {
          if (is_worker_loss(error)) continue;
          std::fprintf(stderr, "unexpected: %s\n", error.what());
          ++unexpected;
        }
      }
    }));
  }
  threads.clear();
  require(unexpected == 0, "calls fail only because a worker died");
  worker.barrier(survivors, seconds(30));
  books_of(worker).clear();
  worker.barrier(survivors, seconds(30));
  wait_until_empty(worker);
  std::printf("rank %u: %lld values lived and ended here\n", worker.rank(),
              static_cast<long long>(books_of(worker).made.load()));
  try {
    worker.barrier(survivors, seconds(30));  // the store lives on rank 0
  } catch (const Error&) {
    if (worker.rank() == 0) throw;
  }
}

class KilledWorkers : public ::testing::TestWithParam<int> {};

TEST_P(KilledWorkers, LeaveEmptyTablesAndNoValueBehind) {
  ProcessWorld world(kWorkers);
  for (int rank = 0; rank < kWorkers; ++rank)
    world.start(rank, "references.survive", {{"TEST_SEED", std::to_string(GetParam())}});
  int killed = 0;
  for (std::size_t i = 0; i < world.size(); ++i) {
    ASSERT_TRUE(world.process(i).wait(world.executor(), seconds(60)))
        << "seed " << GetParam() << ", rank " << i << " still runs";
    if (world.process(i).exit_code() == 128 + SIGKILL) {
      ++killed;
      continue;
    }
    EXPECT_EQ(world.process(i).exit_code(), 0) << "seed " << GetParam() << ", rank " << i << ":\n"
                                               << world.process(i).output();
    EXPECT_THAT(world.process(i).output(), ::testing::HasSubstr("values lived and ended here"));
  }
  EXPECT_EQ(killed, 2);
}
INSTANTIATE_TEST_SUITE_P(Seeds, KilledWorkers, ::testing::Range(1, 7));

/// Creates values on the two others, shares each with the other one, and drops all references.
void share_and_drop(Worker& worker, std::size_t values) {
  constexpr std::size_t kBatch = 1000;
  std::vector<RRef<Tracked>> all;
  for (std::size_t begin = 0; begin < values; begin += kBatch) {
    const std::uint32_t owner = 1 + static_cast<std::uint32_t>(begin / kBatch % 2), other = 3 - owner;
    std::vector<RRef<Tracked>> batch;
    for (std::size_t i = 0; i < kBatch; ++i) batch.push_back(worker.remote(owner, kMake));
    worker.rpc_sync(other, kKeepAll, batch);
    all.insert(all.end(), batch.begin(), batch.end());
  }
  for (const std::uint32_t rank : {1u, 2u}) worker.rpc_sync(rank, kDropAll);
}

constexpr std::int64_t kMiB = 1 << 20;

void churn() {
  auto session = make_session();
  Worker& worker = session->worker();
  std::vector<std::int64_t> heap, pages;
  for (const std::size_t values : {5'000, 10'000, 10'000}) {
    if (worker.rank() == 0) share_and_drop(worker, values);
    worker.barrier();
    wait_until_empty(worker);
    worker.barrier();
    malloc_trim(0);
    const auto memory = testing::resident();
    heap.push_back(testing::heap_in_use());
    pages.push_back(memory.all - memory.shared);
    worker.barrier();  // no worker creates more while others still measure
  }
  const std::string text =
      fmt::format("rank {}: after 10,000 references and 20,000 more twice, {} bytes in use, {} in pages",
                  worker.rank(), fmt::join(heap, ", "), fmt::join(pages, ", "));
  std::printf("%s\n", text.c_str());
  require(heap[1] - heap[0] < 4 * kMiB, text);  // the first rounds leave larger tables and fuller caches
  require(heap[2] - heap[1] < kMiB / 4, text);
  for (const std::int64_t bytes : pages)
    require(testing::kFreedMemoryIsKept || bytes - pages[0] < 32 * kMiB, text);  // overhead of the allocator
  session->shutdown();
}

/// A leak of 13 bytes per reference would exceed the margin.
TEST(Cluster, MemoryComesBackAfterThousandsOfReferences) {
  ProcessWorld world(3);
  world.start_all("references.churn");
  expect_all_end_well(world, seconds(120));
  for (std::size_t rank = 0; rank < world.size(); ++rank)
    std::printf("%s", world.process(rank).output().c_str());
}

const testing::Scenarios kScenarios("references", {{"survive", survive}, {"churn", churn}});

}  // namespace
}  // namespace torchspan::references_test
