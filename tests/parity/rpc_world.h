#pragma once
#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::testing {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using torchspan::testing::error_of;

/// Expects that `call` throws an Error of that kind whose text contains `text`.
template <class F>
void expect_error(ErrorKind kind, const std::string& text, F&& call) {
  const Error error = error_of(std::forward<F>(call));
  EXPECT_EQ(error.kind(), kind) << error.what();
  EXPECT_THAT(error.what(), HasSubstr(text));
}

inline ClusterOptions world_of(int workers, FunctionTable functions = {}) {
  ClusterOptions options;
  options.workers = workers;
  options.functions = std::move(functions);
  return options;
}

/// Runs `body` on every worker of a world, with access to its network, under the seeds 1, 2 and 3; under the last one,
/// waiting callers drive the transport.
inline void on_all_in(const ClusterOptions& options, const std::function<void(Worker&, SimCluster&)>& body) {
  for (std::uint64_t seed = 1; seed <= 3 && !::testing::Test::HasFailure(); ++seed) {
    ClusterOptions seeded = options;
    seeded.seed = seed;
    if (seed == 3) seeded.spin = std::chrono::microseconds(150);
    SimCluster world(std::move(seeded));
    try {
      world.run([&](Worker& worker) { body(worker, world); });
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    if (::testing::Test::HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
}
inline void on_all(const ClusterOptions& options, const std::function<void(Worker&)>& body) {
  on_all_in(options, [&](Worker& worker, SimCluster&) { body(worker); });
}

/// Runs `body` on worker 0 of a world; the others serve.
inline void on_first(const ClusterOptions& options, const std::function<void(Worker&)>& body) {
  on_all(options, [&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}
inline void on_first_in(const ClusterOptions& options,
                        const std::function<void(Worker&, SimCluster&)>& body) {
  on_all_in(options, [&](Worker& worker, SimCluster& world) {
    if (worker.rank() == 0) body(worker, world);
  });
}

/// Gives the functions of a test access to the test's state: state_of<T>(worker).
template <class T>
class StateExtension final : public rpc::Extension {
 public:
  explicit StateExtension(T& state) : state(state) {}
  void attach(rpc::Registrar&) override {}
  T& state;
};
template <class T>
T& state_of(const Worker& worker) {
  return worker.extension<StateExtension<T>>().state;
}
/// All workers share `state`.
template <class T>
ClusterOptions with_state(ClusterOptions options, T& state) {
  options.extensions = [&state] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<StateExtension<T>>(state));
    return extensions;
  };
  return options;
}

inline void nap(const Worker& worker, Duration time) { worker.runtime().executor.sleep(time); }
inline TimePoint now(const Worker& worker) { return worker.runtime().executor.now(); }

}  // namespace torchspan::testing
