// What the store of rank 0 and its clients cost in large worlds: real stores and clients, two simulated threads
// per worker, on the simulated network.
#include <algorithm>
#include <atomic>
#include <gtest/gtest.h>
#include <map>

#include "rendezvous/simulated_world.h"
#include "rendezvous/store/store.h"
#include "tests/scale/measurements.h"
#include "tests/support/memory.h"

namespace torchspan::testing::scale::rendezvous_scale_test {
namespace {

using namespace rendezvous;
using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr int kPerHost = 8;
constexpr Duration kPhase = seconds(10);

/// The cost of one phase of a world's life.
struct Phase {
  Traffic::Counts counts;
  Duration time{};  ///< until the last worker had finished

  void record(const char* what, int workers) const {
    const double p = workers;
    scale::record(what, workers,
                  {{"messages_per_worker", counts.messages / p},
                   {"bytes_per_worker", counts.bytes / p},
                   {"store_messages", counts.store_messages},
                   {"store_bytes", counts.store_bytes},
                   {"microseconds", microseconds_of(time)}});
  }
};

/// Workers that do the same things in phases of simulated time. A meter reads the counters between them.
class PhasedWorld {
 public:
  using Body = std::function<void(PhasedWorld&, int rank)>;
  PhasedWorld(int workers, std::vector<const char*> phases)
      : world_(1, workers), traffic_(world_.network()), names_(std::move(phases)), phases_(names_.size()) {}

  SimulatedWorld& world() { return world_; }
  int size() const { return world_.size(); }

  MembershipOptions options(int rank, std::uint64_t life = 0) const {
    MembershipOptions options = world_.options(rank);
    options.timeout = seconds(60);
    options.heartbeat = hours(1);  // its cost is known: two messages per interval and worker
    options.dead_after = hours(3);
    options.host_id = "a-boot-id-has-36-characters-host" + std::to_string(1000 + rank / kPerHost);
    options.address +=
        "@tls:host" + std::to_string(rank / kPerHost) + ":" + std::to_string(30000 + rank % kPerHost);
    options.functions_digest = 7;
    options.instance += life << 32;
    return options;
  }

  /// Waits for the phase of that name.
  void begin(const char* name) {
    const Deadline until(TimePoint{} + kPhase * index_of(name));
    world_.executor().make_parker()->park(until);
  }
  /// This worker has finished its part of the phase.
  void end(const char* name) {
    const int index = index_of(name);
    Duration& time = phases_[static_cast<std::size_t>(index)].time;
    time = std::max(time, world_.executor().now() - TimePoint{} - kPhase * index);
  }
  const Phase& phase(const char* name) const { return phases_[static_cast<std::size_t>(index_of(name))]; }
  /// Bytes of heap when the first phase had ended.
  std::int64_t heap() const { return heap_; }

  void run(const Body& body) {
    const std::int64_t before = heap_in_use();
    world_.executor().run([&] {
      std::vector<Thread> threads;
      for (int rank = 0; rank < size(); ++rank) {
        threads.push_back(
            world_.executor().spawn("worker" + std::to_string(rank), [&, rank] { body(*this, rank); }));
      }
      threads.push_back(world_.executor().spawn("meter", [&] {
        for (std::size_t i = 0; i < phases_.size(); ++i) {
          world_.executor().make_parker()->park(
              Deadline(TimePoint{} + kPhase * static_cast<int>(i + 1) - milliseconds(1)));
          phases_[i].counts = traffic_.take();
          if (i == 0) heap_ = heap_in_use() - before;
        }
      }));
    });
    for (std::size_t i = 0; i < phases_.size(); ++i) phases_[i].record(names_[i], size());
  }

 private:
  int index_of(const char* name) const {
    return static_cast<int>(std::find(names_.begin(), names_.end(), std::string_view(name)) - names_.begin());
  }

  SimulatedWorld world_;
  Traffic traffic_;
  const std::vector<const char*> names_;
  std::vector<Phase> phases_;
  std::int64_t heap_ = 0;
};

/// Counts the deaths and joins that a worker hears of, and waits for a number of them.
class Observer {
 public:
  Observer(Executor& executor, Membership& membership) : changed_(executor.make_parker()) {
    membership.watch({.joined = [this](const Member&) { ++joins_, changed_->unpark(); },
                      .died = [this](const Member&, const Error&) { ++deaths_, changed_->unpark(); },
                      .left = [this](const Member&) { ++departures_; }});
  }
  void wait_for(int deaths, int joins) {
    while (deaths_ < deaths || joins_ < joins) {
      if (!changed_->park(Deadline(TimePoint{} + hours(1))))
        FAIL() << deaths_ << " deaths, " << joins_ << " joins";
    }
  }

 private:
  std::unique_ptr<Parker> changed_;
  std::atomic<int> deaths_{0}, joins_{0}, departures_{0};
};

/// An eighth of the workers, irregularly.
bool is_victim(int rank) {
  return rank != 0 && (static_cast<std::uint32_t>(rank) * 2654435761U >> 16) % 8 == 0;
}

/// Joins, rounds, deaths and replacements, and the graceful end, as every worker sees them.
void live(PhasedWorld& scene, int rank, int victims) {
  SimulatedWorld& world = scene.world();
  SimExecutor& executor = world.executor();
  auto membership = world.join(rank, scene.options(rank));
  auto observer = std::make_unique<Observer>(executor, *membership);
  scene.end("join");
  scene.begin("barrier");
  membership->barrier("b", {}, world.in(seconds(60)));
  scene.end("barrier");
  scene.begin("gather");
  const std::string mine = fmt::format("{:<64}", rank);
  const auto all =
      membership->all_gather_bytes("g", std::as_bytes(std::span(mine)), {}, world.in(seconds(60)));
  EXPECT_EQ(all.size(), static_cast<std::size_t>(scene.size()));
  scene.end("gather");
  scene.begin("deaths");
  if (is_victim(rank)) {
    world.kill(rank);
    observer.reset();
    membership.reset();
  } else {
    observer->wait_for(victims, 0);
    scene.end("deaths");
  }
  scene.begin("replacements");
  if (is_victim(rank)) {
    membership = world.join(rank, scene.options(rank, 1));
  } else {
    observer->wait_for(victims, victims);
  }
  scene.end("replacements");
  scene.begin("shutdown");
  // The rounds of a graceful shutdown in which no worker has work left: twice two.
  for (int round = 0; round < 4; ++round) {
    const CountSums sums = membership->sum("s", {1, 2}, {}, {}, {.until = world.in(seconds(60))});
    EXPECT_EQ(sums.counts.at(1), 2U * static_cast<unsigned>(scene.size()));
  }
  membership->leave(world.in(seconds(60)));
  scene.end("shutdown");
}

TEST(RendezvousScale, RoundsDeathsAndTheEndCostEachWorkerTheSameInEveryWorld) {
  for (const int workers : world_sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    PhasedWorld scene(workers, {"join", "barrier", "gather", "deaths", "replacements", "shutdown"});
    int victims = 0;
    for (int rank = 0; rank < workers; ++rank) victims += is_victim(rank) ? 1 : 0;
    scene.run([victims](PhasedWorld& world, int rank) { live(world, rank, victims); });
    const double p = workers, dead = victims, living = p - dead;
    record("heap", workers, {{"bytes_per_worker", static_cast<double>(scene.heap()) / p}});

    // Every worker learns of every other one: the bytes of a join grow with the world, at most 60 per member.
    const Traffic::Counts join = scene.phase("join").counts;
    EXPECT_LE(join.messages, 4 * p) << "a registration, a welcome, a heartbeat and its answer";
    EXPECT_LE(join.store_bytes, p * (60 * p + 200));
    const Traffic::Counts barrier = scene.phase("barrier").counts;
    EXPECT_EQ(barrier.messages, 2 * p);
    EXPECT_LE(barrier.bytes, 100 * p);
    const Traffic::Counts gather = scene.phase("gather").counts;
    EXPECT_EQ(gather.messages, 2 * p);
    EXPECT_LE(gather.bytes, p * (70 * p + 200));
    // One message announces a burst.
    const Traffic::Counts deaths = scene.phase("deaths").counts;
    EXPECT_LE(deaths.messages, 3 * living);
    EXPECT_LE(deaths.bytes, living * (4 * dead + 500));
    // The joins of the burst arrive one after another. Members in the order of their arrival take more bytes than in the order of their ranks.
    const Traffic::Counts replacements = scene.phase("replacements").counts;
    EXPECT_LE(replacements.store_messages, 2 * dead + 4 * p);
    EXPECT_LE(replacements.store_bytes, p * (80 * dead + 500) + dead * (60 * p + 500));
    const Traffic::Counts shutdown = scene.phase("shutdown").counts;
    EXPECT_LE(shutdown.messages, (2 * 4 + 2 + 2) * p);
    EXPECT_LE(shutdown.bytes, p * (500 + 4 * 4 * dead)) << "a round names the ranks with a replaced worker";
    for (const char* phase : {"barrier", "gather", "deaths", "shutdown"}) {
      EXPECT_LE(scene.phase(phase).time, milliseconds(60)) << phase;
    }
  }
}

TEST(RendezvousScale, TheEndOfRankZeroReachesAllWithoutMessages) {
  for (const int workers : world_sizes(1024)) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    PhasedWorld scene(workers, {"start", "end of rank 0"});
    scene.run([](PhasedWorld& world, int rank) {
      const auto membership = world.world().join(rank, world.options(rank));
      Observer observer(world.world().executor(), *membership);
      world.end("start");
      world.begin("end of rank 0");
      if (rank == 0) return world.world().kill(0);
      observer.wait_for(1, 0);
      world.end("end of rank 0");
    });
    EXPECT_EQ(scene.phase("end of rank 0").counts.messages, 0);
    EXPECT_LE(scene.phase("end of rank 0").time, milliseconds(1));
  }
}

/// A store without a network: what its tables hold, and what its work takes.
class BareStore {
 public:
  explicit BareStore(int workers)
      : workers_(workers),
        executor_(make_executor()),
        store_({.world_size = workers, .job = "job"},
               {.send = [this](ConnectionId,
                               const SharedBytes& bytes) { sent_ += static_cast<double>(bytes->size()); },
                .close = [](ConnectionId) {}}) {}

  /// Gives the store one message of each rank; returns the microseconds that it takes per rank.
  template <class Make>
  double per_worker(Make make) {
    std::vector<Bytes> messages;
    for (int rank = 0; rank < workers_; ++rank) messages.push_back(encode_message(make(rank)));
    const TimePoint began = executor_->now();
    for (int rank = 0; rank < workers_; ++rank) {
      store_.on_message(static_cast<ConnectionId>(rank), messages[static_cast<std::size_t>(rank)], kNow);
    }
    store_.tick(kNow);
    return microseconds_of(executor_->now() - began) / workers_;
  }
  Store& store() { return store_; }
  static constexpr TimePoint kNow{};

 private:
  const int workers_;
  const std::unique_ptr<Executor> executor_;
  double sent_ = 0;
  Store store_;
};

TEST(RendezvousScale, TheStoreHoldsAndDoesTheSameForEachWorkerOfEveryWorld) {
  double first_heap = 0;
  for (const int workers : world_sizes()) {
    SCOPED_TRACE(fmt::format("{} workers", workers));
    const std::int64_t before = heap_in_use();
    BareStore bare(workers);
    const double registering = bare.per_worker([&](int rank) {
      Register message;
      message.job = "job";
      message.member.name = fmt::format("worker{}", rank);
      message.member.rank = rank;
      message.member.address = fmt::format("tls:host{}:{}", rank / kPerHost, 30000 + rank % kPerHost);
      message.member.host = fmt::format("host{}", rank / kPerHost);
      message.member.host_id = fmt::format("01234567-89ab-cdef-0123-4567{:08}", rank / kPerHost);
      message.member.functions_digest = 7;
      message.world_size = workers;
      message.timeout = seconds(60);
      for (int i = 0; i < 50; ++i)
        message.functions.push_back(fmt::format("function{}(Tensor, Tensor) -> Tensor", i));
      return message;
    });
    const double heap = static_cast<double>(heap_in_use() - before) / workers;
    std::vector<int> ranks;
    for (int rank = 0; rank < workers; ++rank) ranks.push_back(rank);
    const double barrier = bare.per_worker([&](int) {
      Contribute message;
      message.tag = "b";
      message.ranks = ranks;
      message.timeout = seconds(60);
      message.incarnations.resize(ranks.size());
      return message;
    });
    const double leaving = bare.per_worker([](int) { return Leave{}; });
    EXPECT_TRUE(bare.store().is_finished());
    record("store", workers,
           {{"heap_per_worker", heap},
            {"register_microseconds", registering},
            {"barrier_microseconds", barrier},
            {"leave_microseconds", leaving}});
    if (first_heap == 0) first_heap = heap;
    EXPECT_LE(heap, 1.25 * first_heap + 100) << "one copy of the function table, whatever the size";
  }
}

}  // namespace
}  // namespace torchspan::testing::scale::rendezvous_scale_test
