// Compares random programs over several workers with the same program in one process: values of gradients,
// and which parameters have a gradient.
#include "tests/support/autograd_programs.h"
#include "tests/support/cluster.h"
#include "tests/support/environment.h"

namespace torchspan::random_programs_test {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

ClusterOptions cluster(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions = program_functions();
  options.network.jitter = std::chrono::microseconds(seed % 3 == 0 ? 0 : 200);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<autograd::AutogradExtension>());
    return extensions;
  };
  return options;
}

/// TORCHSPAN_CASES sets the number of programs; TORCHSPAN_SEED repeats one.
TEST(RandomPrograms, HaveTheGradientsOfOneProcessAndNoOthers) {
  const long cases = number_from("TORCHSPAN_CASES", 120), first = number_from("TORCHSPAN_SEED", 1);
  Comparison compare;
  long impossible = 0;
  for (long seed = first; seed < first + cases; ++seed) {
    const Program program = make_program(static_cast<std::uint64_t>(seed));
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, program.text()));
    Outcome expected, ours;
    try {
      expected = run_locally(program);
    } catch (const c10::Error& error) {  // LibTorch's engine cannot retain an undefined gradient
      ASSERT_THAT(error.what(), ::testing::HasSubstr("Expected a proper Tensor but got None"));
      ++impossible;
      continue;
    }
    SimCluster world(cluster(program.workers, static_cast<std::uint64_t>(seed)));
    try {
      world.run([&](Worker& worker) {
        if (worker.rank() == 0) ours = run_remotely(worker, program);
      });
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    ASSERT_EQ(compare(ours, expected), "");
  }
  EXPECT_GT(compare.with_gradient, cases / 2) << "the cases compared too little";
  EXPECT_LE(impossible, 1 + cases / 20);
  EXPECT_GT(compare.without, cases / 2);
}

/// The outcome on worker 0, in a world whose simulated network uses `seed`.
Outcome run_in_world(const Program& program, std::uint64_t seed) {
  Outcome outcome;
  ClusterOptions options = cluster(program.workers, seed);
  options.network.jitter = std::chrono::milliseconds(2);
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) outcome = run_remotely(worker, program);
  });
  return outcome;
}

/// For any order of messages and any number of threads. Excludes programs whose handlers use tensors of other
/// handlers.
TEST(RandomPrograms, HaveTheSameBitsUnderAnyNetworkTiming) {
  const long cases = number_from("TORCHSPAN_CASES", 120) / 4, first = number_from("TORCHSPAN_SEED", 1);
  int compared = 0;
  for (long seed = first; seed < first + cases; ++seed) {
    Program program = make_program(static_cast<std::uint64_t>(seed));
    const bool fetches = std::any_of(program.instructions.begin(), program.instructions.end(),
                                     [](const Instruction& in) { return in.kind == Instruction::kFetch; });
    if (fetches) continue;
    // Many uses of each value, so that sums have many terms.
    for (auto& loss : program.losses) loss.insert(loss.end(), loss.begin(), loss.end());
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=4: {}", seed, program.text()));
    const Outcome one = run_in_world(program, 11), other = run_in_world(program, 12 + seed % 7);
    for (const auto& [name, value] : one.gradients) {
      const at::Tensor& same = other.gradients.at(name);
      ASSERT_EQ(value.defined(), same.defined()) << name;
      if (!value.defined()) continue;
      ++compared;
      ASSERT_TRUE(at::equal(value.to_dense(), same.to_dense())) << name << value << same;
    }
  }
  EXPECT_GT(compared, cases / 2);
}

}  // namespace
}  // namespace torchspan::random_programs_test
