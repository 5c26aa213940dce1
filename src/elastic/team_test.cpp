// A team's copies and comparisons, over ranks in one process.
#include "elastic/team.h"

#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/nn.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>
#include <torchspan/elastic.h>

#include "tests/support/errors.h"
#include "tests/support/ranks.h"

namespace torchspan::elastic::team_test {
namespace {

using testing::error_text;
using testing::on_ranks;
using testing::Rank;

/// One value of each kind, which begins as `value`.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(double value) {
    weight = register_parameter("weight", at::ones({2}));
    mine = register_parameter("mine", at::full({2}, value));
    seen = register_buffer("seen", at::full({2}, value));
  }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight, mine, seen;
};
TORCH_MODULE(Net);

Team team_of(const Rank& self, std::vector<int> holders) {
  quorum::Generation generation;
  generation.ranks = {0, 1, 2};
  generation.holders = std::move(holders);
  return {[&](const collective::GroupOptions&) { return self.group; }, ElasticOptions{}, generation};
}

// All ranks once got the donor's buffers, also those that DistributedDataParallel leaves to each rank, and parameters that
// differ were an error although the program ignores them.
TEST(Team, LeavesToEachRankWhatIsItsOwn) {
  on_ranks(3, [](const Rank& self) {
    const bool is_new = self.rank == 2;  // it has not wrapped the module yet, so that it has no places
    Net net(self.rank), other(self.rank);
    DistributedDataParallel<Net> model(
        is_new ? other : net, self.group,
        {.broadcast_buffers = false, .initial_sync = false, .ignored_parameters = {"mine"}});
    team_of(self, {0, 1}).compare(*net, net->buffers(), {});
    EXPECT_EQ(net->seen[0].item<double>(), self.rank);
    EXPECT_EQ(net->mine[0].item<double>(), self.rank);
    const at::NoGradGuard no_grad;
    net->weight.add_(self.rank == 2 ? 1 : 0);
    const std::string text = error_text([&] { team_of(self, {0, 1}).compare(*net, net->buffers(), {}); });
    EXPECT_NE(text.find("of ranks 0 and 2 differ"), std::string::npos) << text;
  });
}

TEST(Team, GivesBuffersThatRanksShareToAll) {
  on_ranks(3, [](const Rank& self) {
    Net net(self.rank);
    const at::NoGradGuard no_grad;
    net->mine.zero_();
    team_of(self, {0, 1}).compare(*net, net->buffers(), {});
    EXPECT_EQ(net->seen[0].item<double>(), 1) << "the last holder's";
  });
}

}  // namespace
}  // namespace torchspan::elastic::team_test
