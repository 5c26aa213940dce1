// Sparse gradients that are missing on some ranks. Such a rank does not know how many sparse dimensions the
// other ranks' gradients have; this must not break the group.
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::sparse_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

/// An embedding followed by a layer; a batch without words does not use the embedding.
struct WordsImpl : nn::Module {
  WordsImpl()
      : table(register_module("table", nn::Embedding(nn::EmbeddingOptions(6, 2).sparse(true)))),
        layer(register_module("layer", nn::Linear(nn::LinearOptions(2, 1).bias(false)))) {
    const at::NoGradGuard no_grad;
    table->weight.fill_(1);
    layer->weight.fill_(1);
  }
  at::Tensor forward(const std::vector<std::int64_t>& words) {
    return layer(words.empty() ? at::ones({1, 2}) : table(at::tensor(words))).sum();
  }
  nn::Embedding table;
  nn::Linear layer;
};
TORCH_MODULE(Words);

/// The gradient of the table if all ranks together look up row i `counts[i]` times.
at::Tensor looked_up(std::vector<double> counts, double ranks) {
  return at::tensor(counts).div(ranks).unsqueeze(1).expand({6, 2});
}

TEST(MissingSparseGradients, OfAnEmbeddingThatOneRankDoesNotUse) {
  for (const int without : {0, 1, 2}) {
    on_ranks(3, [&](const Rank& self) {
      Words net;
      DistributedDataParallel model(net, self.group, {.find_unused_parameters = true});
      for (int i = 0; i < 3; ++i) {
        net->zero_grad(/*set_to_none=*/true);
        model(self.rank == without ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{1, 4})
            .backward();
        EXPECT_EQ(net->table->weight.grad().sparse_dim(), 1);
        expect_close(net->table->weight.grad(), looked_up({0, 2, 0, 0, 2, 0}, 3), 1e-6);
      }
    });
  }
}

TEST(MissingSparseGradients, OfRanksThatRanOutOfBatches) {
  on_ranks(3, [&](const Rank& self) {
    Words net;
    DistributedDataParallel model(net, self.group);
    const int batches = 1 + self.rank;
    int done = 0;
    model.join([&] {
      for (; done < batches; ++done) {
        net->zero_grad(/*set_to_none=*/true);
        model(std::vector<std::int64_t>{1}).backward();
        expect_close(net->table->weight.grad(), looked_up({0, 3.0 - done, 0, 0, 0, 0}, 3), 1e-6);
      }
    });
    EXPECT_EQ(done, batches);
  });
}

/// The identity; throws in backward on demand.
struct Throw : torch::autograd::Function<Throw> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, bool throws) {
    context->saved_data["throws"] = throws;
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["throws"].toBool()) throw std::runtime_error("the layer failed");
    return {gradients[0], at::Tensor()};
  }
};

struct FailingWordsImpl : nn::Module {
  FailingWordsImpl() : words(register_module("words", Words())) {}
  at::Tensor forward(const std::vector<std::int64_t>& rows, bool throws) {
    const at::Tensor found = words->table(at::tensor(rows));
    return words->layer(Throw::apply(found, throws)).sum();
  }
  Words words;
};
TORCH_MODULE(FailingWords);

TEST(MissingSparseGradients, OfARankWhoseBackwardThrows) {
  on_ranks(3, [](const Rank& self) {
    FailingWords net;
    DistributedDataParallel model(net, self.group);
    for (int i = 0; i < 4; ++i) {
      net->zero_grad(/*set_to_none=*/true);
      const at::Tensor loss = model(std::vector<std::int64_t>{2}, i % 2 == 1 && self.rank == 1);
      if (i % 2 == 1) {
        try {
          loss.backward();
          ADD_FAILURE() << "the pass went well";
        } catch (const std::exception& error) {
          const std::string wanted = self.rank == 1 ? "the layer failed" : "rank 1 gave up";
          EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos) << error.what();
        }
      } else {
        loss.backward();
        expect_close(net->words->table->weight.grad(), looked_up({0, 0, 3, 0, 0, 0}, 3), 1e-6);
      }
    }
  });
}

/// gather() makes all dimensions sparse; an embedding only the first.
TEST(MissingSparseGradients, MayBeOfAnyNumberOfSparseDimensions) {
  on_ranks(2, [](const Rank& self) {
    const Tensors parameters{leaf({3, 2}), leaf({2})};
    auto list = named(parameters);
    list[0].sparse_gradient = true;
    Reducer reducer(list, self.group, {.find_unused_parameters = true});
    for (int i = 0; i < 2; ++i) {
      zero(parameters, true);
      at::Tensor loss = parameters[1].sum();
      if (self.rank == 1) {
        loss = loss + parameters[0].gather(0, at::tensor({2L, 0L}).view({1, 2}), /*sparse_grad=*/true).sum();
      }
      step(reducer, loss);
      EXPECT_EQ(parameters[0].grad().sparse_dim(), 2);
      expect_close(parameters[0].grad(), at::tensor({0.0, 0.5, 0.0, 0.0, 0.5, 0.0}).view({3, 2}), 1e-6);
    }
  });
}

/// Module::to() does not move parameters to this device.
struct WithoutMemory : nn::Module {
  WithoutMemory() { register_parameter("weight", at::empty({2}, at::device(at::kMeta))); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};

TEST(Devices, ThatTheGroupDoesNotTakeAreRefusedWithTheNameOfTheParameter) {
  on_ranks(2, [](const Rank& self) {
    const auto net = std::make_shared<WithoutMemory>();
    const std::string text = error_text([&] { DistributedDataParallel model(net, self.group); });
    EXPECT_NE(text.find("'weight' is on meta"), std::string::npos) << text;
    EXPECT_NE(text.find("move the module to the CPU"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::sparse_test
