// Random programs over several workers, held against the same program in one process: values of gradients,
// and which parameters have one at all.
#include "tests/support/autograd_programs.h"
#include "tests/support/cluster.h"
#include "tests/support/environment.h"

namespace torchspan {
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
    extensions.push_back(std::make_unique<autograd::Passes>());
    return extensions;
  };
  return options;
}

/// TORCHSPAN_CASES and TORCHSPAN_SEED run more, or one again.
TEST(RandomPrograms, HaveTheGradientsOfOneProcessAndNoOthers) {
  const long cases = number_from("TORCHSPAN_CASES", 400), first = number_from("TORCHSPAN_SEED", 1);
  Comparison compare;
  for (long seed = first; seed < first + cases; ++seed) {
    const Program program = make_program(static_cast<std::uint64_t>(seed));
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, program.text()));
    const Outcome expected = run_locally(program);
    Outcome ours;
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
  EXPECT_GT(compare.without, cases / 2);
}

}  // namespace
}  // namespace torchspan
