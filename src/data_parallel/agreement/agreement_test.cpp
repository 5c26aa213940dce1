#include "data_parallel/api/agreement.h"

#include <gtest/gtest.h>

#include <torchspan/core/error.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::agreement_test {
namespace {

using namespace testing;

/// The error text if rank 1 builds its reducer differently; the same on all ranks.
std::string disagreement(
    const std::function<std::vector<Parameter>(int)>& parameters,
    const std::function<DataParallelOptions(int)>& options = [](int) { return DataParallelOptions{}; }) {
  PerRank<std::string> texts(3);
  on_ranks(3, [&](const Rank& self) {
    texts[self.rank] =
        error_text([&] { Reducer reducer(parameters(self.rank), self.group, options(self.rank)); });
  });
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  return texts[0];
}

std::vector<Parameter> two(const at::Tensor& second) { return {{"first", leaf({2})}, {"second", second}}; }

// peer: ddp param_layout_mismatch_error: better: names the parameter, on every rank
// peer: ddp ddp_model_diff_shape_across_ranks, ddp_model_diff_num_params_across_ranks,
//   verify_model_across_rank_*: better: names, dtypes, flags, options too; the same text on every rank
TEST(Agreement, NamesTheParameterWhoseShapeStridesDtypeOrFlagsDiffer) {
  const std::vector<std::pair<std::function<at::Tensor(int)>, std::string>> cases{
      {[](int rank) { return leaf({rank == 1 ? 4 : 3}); }, "[4]"},
      {[](int rank) {
         return rank == 1 ? leaf({3, 2}).detach().t().set_requires_grad(true) : leaf({2, 3});
       },
       "[1, 2]"},
      {[](int rank) { return leaf({3}, rank == 1 ? at::kDouble : at::kFloat); }, "Double"},
      {[](int rank) { return leaf({3}).set_requires_grad(rank != 1); }, "without gradient"},
  };
  for (const auto& example : cases) {
    const std::string& detail = example.second;
    const std::string text = disagreement([&example](int rank) { return two(example.first(rank)); });
    EXPECT_NE(text.find("'second' is"), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
    EXPECT_NE(text.find(detail), std::string::npos) << text;
  }
  const std::string sparse = disagreement([](int rank) {
    auto parameters = two(leaf({3}));
    parameters[1].sparse_gradient = rank == 1;
    return parameters;
  });
  EXPECT_NE(sparse.find("sparse"), std::string::npos) << sparse;
}

// peer: ddp ddp_model_diff_shape_across_ranks
TEST(Agreement, NamesWhatIsMissingOrInAnotherOrder) {
  const std::string count = disagreement([](int rank) {
    auto parameters = two(leaf({3}));
    if (rank == 1) parameters.push_back({"third", leaf({1})});
    return parameters;
  });
  EXPECT_NE(count.find("'third'"), std::string::npos) << count;
  const std::string order = disagreement([](int rank) {
    auto parameters = two(leaf({2}));
    if (rank == 1) std::swap(parameters[0], parameters[1]);
    return parameters;
  });
  EXPECT_NE(order.find("'first' on rank 0 and 'second' on rank 1"), std::string::npos) << order;
}

// peer: ddp ddp_model_diff_shape_across_ranks
TEST(Agreement, NamesTheOptionThatDiffers) {
  const std::string text =
      disagreement([](int) { return two(leaf({3})); },
                   [](int rank) { return DataParallelOptions{.static_graph = rank == 1}; });
  EXPECT_NE(text.find("static_graph is false on rank 0 and true on rank 1"), std::string::npos) << text;
}

// peer: ddp DistributedDataParallel_requires_grad: same
TEST(Agreement, ReportsToAllRanksThatOneCannotBegin) {
  const std::string nothing =
      disagreement([](int rank) { return rank == 1 ? std::vector<Parameter>{} : two(leaf({3})); });
  EXPECT_NE(nothing.find("rank 1 cannot begin: there are no parameters"), std::string::npos) << nothing;
  const std::string frozen = disagreement([](int) {
    return std::vector<Parameter>{{"only", leaf({3}).set_requires_grad(false)}};
  });
  EXPECT_NE(frozen.find("requires a gradient"), std::string::npos) << frozen;
  const std::string option = disagreement([](int) { return two(leaf({3})); },
                                          [](int) { return DataParallelOptions{.bucket_cap_mb = 0}; });
  EXPECT_NE(option.find("bucket_cap_mb"), std::string::npos) << option;
}

TEST(Agreement, NamesATensorThatIsListedTwice) {
  on_ranks(2, [](const Rank& self) {
    const at::Tensor one = leaf({2}), other = leaf({2});
    const std::string twice = error_text([&] { Reducer(named({one, other, one}), self.group); });
    EXPECT_NE(twice.find("parameter 'p2' is the same tensor as 'p0'; list it once"), std::string::npos)
        << twice;
    const std::string replicas = error_text([&] {
      Reducer(Reducer::Replicas{named({one}), named({one})}, self.group);
    });
    EXPECT_NE(replicas.find("parameter 'p0' of replica 1 is the same tensor as 'p0' of replica 0"),
              std::string::npos)
        << replicas;
  });
}

TEST(Agreement, SurvivesItsEncodingAndRefusesDamagedBytes) {
  Agreement agreement{.failure = "f", .settings = {{"a", "b"}}};
  agreement.add("weight", leaf({2, 3}));
  const Bytes bytes = agreement.encode();
  const Agreement back = Agreement::decode(bytes);
  EXPECT_EQ(back.settings, agreement.settings);
  EXPECT_EQ(back.tensors, agreement.tensors);
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(Agreement::decode(BytesView(bytes).first(size)), Error);
}

}  // namespace
}  // namespace torchspan::data_parallel::agreement_test
