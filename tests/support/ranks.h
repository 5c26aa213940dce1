#pragma once
#include <cstdlib>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/sim_executor.h"
#include "tests/conformance/collective_world.h"
#include "tests/support/in_process_group.h"

namespace torchspan::testing {

/// The arguments of one rank's thread.
struct Rank {
  int rank;
  int size;
  Runtime& runtime;
  collective::Group group;
  std::function<void()> die;  ///< makes the rank die for the others
};
using RankBody = std::function<void(const Rank&)>;

/// Whether this run uses real groups in shared memory, whose ranks never die by themselves.
inline bool over_shared_memory() {
  const char* kind = std::getenv("TORCHSPAN_TEST_GROUPS");
  return kind != nullptr && std::string(kind) == "shm";
}

inline void on_shared_memory_ranks(int size, const RankBody& body) {
  CollectiveWorld world(size);
  collective::GroupOptions options;
  options.backend = collective::BackendKind::kSharedMemory;
  options.timeout = std::chrono::seconds(60);
  options.shared_bytes = std::uint64_t{64} << 20;
  const auto live = [&](const CollectiveWorld::Rank& self) {
    self.runtime.log.set_level(LogLevel::kOff);
    body(Rank{self.rank, size, self.runtime, collective::Group::make(self.runtime, self.membership, options),
              [] {}});
  };
  for (const auto& failure : world.try_each(live)) {
    if (failure) ADD_FAILURE() << to_error(failure).what();
  }
}

/// Runs `body` once per rank, each on a separate thread, over groups in this process on a simulated executor:
/// the same seed gives the same run. An exception of `body` fails the test.
inline void on_ranks(int size, const RankBody& body, std::uint64_t seed = 1, InProcessOptions options = {}) {
  if (over_shared_memory()) return on_shared_memory_ranks(size, body);
  SimExecutor executor(seed);
  executor.run([&] {
    std::vector<std::unique_ptr<Runtime>> runtimes;
    InProcessWorld world(executor, size, options);
    std::vector<Thread> threads;
    for (int rank = 0; rank < size; ++rank)
      runtimes.push_back(std::make_unique<Runtime>(executor, "rank" + std::to_string(rank), LogLevel::kOff));
    for (int rank = 0; rank < size; ++rank) {
      threads.push_back(executor.spawn("rank" + std::to_string(rank), [&, rank] {
        try {
          body(Rank{rank, size, *runtimes[rank], world.group(rank, *runtimes[rank]),
                    [&world, rank] { world.kill(rank); }});
        } catch (const std::exception& error) {
          ADD_FAILURE() << "rank " << rank << " threw: " << error.what();
          world.kill(rank);
        }
      }));
    }
    for (Thread& thread : threads) thread.join();
  });
}

/// The results of every rank, compared when all have ended.
template <class T>
class PerRank {
 public:
  explicit PerRank(int size) : values_(static_cast<std::size_t>(size)) {}
  T& operator[](int rank) { return values_[static_cast<std::size_t>(rank)]; }
  const T& operator[](int rank) const { return values_[static_cast<std::size_t>(rank)]; }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::vector<T> values_;
};

}  // namespace torchspan::testing
