#include <fmt/format.h>
#include <gmock/gmock.h>
#include <map>
#include <string>
#include <vector>

#include "pipeline/random_model.h"
#include "tests/support/environment.h"

namespace torchspan::pipeline::testing::oracle_checkpoint_test {
namespace {

/// Names of tensors that differ in any bit.
std::vector<std::string> differing(const Outcome& ours, const Outcome& expected) {
  std::vector<std::string> names;
  for (const auto& [name, value] : expected.gradients) {
    const at::Tensor& mine = ours.gradients.at(name);
    if (value.defined() != mine.defined() || (value.defined() && !value.equal(mine))) names.push_back(name);
  }
  for (const auto& [name, value] : expected.buffers) {
    if (!value.equal(ours.buffers.at(name))) names.push_back(name);
  }
  return names;
}

TEST(OracleCheckpoint, WhichLayersRecomputeChangesNoBit) {
  const long cases = torchspan::testing::number_from("TORCHSPAN_CASES", 40);
  const long first = torchspan::testing::number_from("TORCHSPAN_SEED", 1000);
  int compared = 0;
  for (long seed = first; seed < first + cases; ++seed) {
    RandomCase random = make_case(static_cast<std::uint64_t>(seed));
    // Sums in order of arrival may differ from run to run.
    if (random.options.checkpoint_layers.empty() || random.options.schedule == Schedule::kArrival) continue;
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, random.text));
    const Outcome some = run_in_pipeline(random, static_cast<std::uint64_t>(seed));
    random.options.checkpoint_layers.clear();
    const Outcome all = run_in_pipeline(random, static_cast<std::uint64_t>(seed));
    random.options.checkpoint = ActivationCheckpoint::kNever;
    const Outcome none = run_in_pipeline(random, static_cast<std::uint64_t>(seed));
    EXPECT_THAT(differing(some, none), ::testing::IsEmpty());
    EXPECT_THAT(differing(all, none), ::testing::IsEmpty());
    EXPECT_EQ(some.losses, none.losses);
    ++compared;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(compared, cases / 10) << "few cases had layers to recompute";
}

}  // namespace
}  // namespace torchspan::pipeline::testing::oracle_checkpoint_test
