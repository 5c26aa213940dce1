// What programs do with a wrapped module besides plain training, mostly from other libraries' test lists
// (tests/peers.txt).
#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/module/broadcast.h"
#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel {

template <>
struct OutputTensors<torch::nn::utils::rnn::PackedSequence> {
  static void visit(torch::nn::utils::rnn::PackedSequence& value, auto& visitor) {
    at::Tensor data = value.data();
    visit_tensors(data, visitor);
    value = torch::nn::utils::rnn::PackedSequence(data, value.batch_sizes(), value.sorted_indices(),
                                                  value.unsorted_indices());
  }
};

}  // namespace torchspan::data_parallel

namespace torchspan::data_parallel::programs_test {
namespace {

using namespace testing;
namespace nn = torch::nn;
namespace rnn = torch::nn::utils::rnn;

at::Tensor values(at::IntArrayRef sizes, double seed, at::ScalarType dtype = at::kFloat) {
  std::int64_t count = 1;
  for (const auto size : sizes) count *= size;
  return at::arange(count, at::kDouble).mul(0.59).add(seed).sin().reshape(sizes).to(dtype);
}

void fill(nn::Module& module) {
  const at::NoGradGuard no_grad;
  double seed = 0;
  for (auto& parameter : module.parameters()) parameter.copy_(values(parameter.sizes(), seed += 1) * 0.5);
}

/// The average over ranks of the gradients that each rank computes alone from `loss`, a function of the rank.
Tensors average_alone(nn::Module& module, int size, const std::function<at::Tensor(int)>& loss) {
  module.zero_grad();
  for (int rank = 0; rank < size; ++rank) loss(rank).backward();
  Tensors averages;
  for (const auto& parameter : module.parameters())
    averages.push_back(parameter.grad().defined() ? parameter.grad() / size : at::Tensor());
  return averages;
}

void expect_gradients(nn::Module& module, const Tensors& wanted, double tolerance = 1e-6) {
  const auto parameters = module.named_parameters();
  ASSERT_EQ(parameters.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    SCOPED_TRACE(parameters[i].key());
    ASSERT_EQ(parameters[i].value().grad().defined(), wanted[i].defined());
    if (wanted[i].defined()) expect_close(parameters[i].value().grad(), wanted[i], tolerance);
  }
}

/// While it lives, matrix products on this thread use bfloat16.
class Autocast {
 public:
  Autocast() { at::autocast::set_cpu_enabled(true); }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_cpu_enabled(false);
  }
};

// peer: ddp DistributedDataParallel_with_amp_and_grad_is_view: same, on CPU: autocast to bfloat16
TEST(Programs, MayRunTheForwardUnderAutocast) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      nn::Linear mine(4, 3), alone(4, 3);
      fill(*mine), fill(*alone);
      DistributedDataParallel model(mine, self.group, {.gradient_as_bucket_view = view});
      const auto input = [](int rank, int step) { return values({5, 4}, rank + 2 * step); };
      for (int step = 0; step < 3; ++step) {
        const Tensors wanted = average_alone(*alone, self.size, [&](int rank) {
          const Autocast narrow;
          return alone(input(rank, step)).to(at::kFloat).pow(2).sum();
        });
        mine->zero_grad();
        at::Tensor loss;
        {
          const Autocast narrow;
          const at::Tensor output = model(input(self.rank, step));
          EXPECT_EQ(output.scalar_type(), at::kBFloat16);
          loss = output.to(at::kFloat).pow(2).sum();
        }
        loss.backward();
        EXPECT_EQ(mine->weight.grad().scalar_type(), at::kFloat);
        expect_gradients(*mine, wanted, 1e-5);
      }
    });
  }
}

struct ReaderImpl : nn::Module {
  ReaderImpl() : lstm(register_module("lstm", nn::LSTM(3, 4))) {}
  rnn::PackedSequence forward(const rnn::PackedSequence& text) {
    return std::get<0>(lstm->forward_with_packed_input(text));
  }
  nn::LSTM lstm;
};
TORCH_MODULE(Reader);

// peer: ddp ddp_packed_sequence: same, with lengths that differ between ranks
TEST(Programs, MayFeedAndReturnPackedSequences) {
  on_ranks(2, [](const Rank& self) {
    Reader mine, alone;
    fill(*mine), fill(*alone);
    DistributedDataParallel model(mine, self.group);
    const auto text = [](int rank) {  // of a different length on each rank
      const at::Tensor lengths = at::tensor(std::vector<std::int64_t>{5, 3 - rank, 1});
      return rnn::pack_padded_sequence(values({5, 3, 3}, rank), lengths);
    };
    const Tensors wanted =
        average_alone(*alone, 2, [&](int rank) { return alone(text(rank)).data().pow(2).sum(); });
    model(text(self.rank)).data().pow(2).sum().backward();
    expect_gradients(*mine, wanted);
  });
}

/// Two layers; the bias of the unused one is also a parameter of the module.
struct SharedBiasImpl : nn::Module {
  SharedBiasImpl() : unused(register_module("unused", nn::Linear(2, 2))) {
    bias = register_parameter("bias", at::ones({2}));
    unused->bias = bias;
    used = register_module("used", nn::Linear(2, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return used(x); }
  nn::Linear unused{nullptr}, used{nullptr};
  at::Tensor bias;
};
TORCH_MODULE(SharedBias);

// peer: ddp ddp_shared_grad_acc_unused_params: same
TEST(Programs, MayShareAParameterBetweenLayersThatAreNotUsed) {
  on_ranks(2, [](const Rank& self) {
    SharedBias mine, alone;
    fill(*mine), fill(*alone);
    DistributedDataParallel model(mine, self.group, {.find_unused_parameters = true});
    for (int step = 0; step < 3; ++step) {
      const auto input = [&](int rank) { return values({3, 2}, rank + step); };
      const Tensors wanted =
          average_alone(*alone, 2, [&](int rank) { return alone(input(rank)).pow(2).sum(); });
      for (auto& parameter : mine->parameters()) parameter.mutable_grad() = at::Tensor();
      model(input(self.rank)).pow(2).sum().backward();
      expect_gradients(*mine, wanted);
    }
  });
}

/// Returns tensors that it creates: one that requires no gradient, and a leaf that requires one.
struct MakesTensorsImpl : nn::Module {
  MakesTensorsImpl() : linear(register_module("linear", nn::Linear(2, 2))) {}
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    return {linear(x), at::full({2}, 3), at::ones({2}).requires_grad_()};
  }
  nn::Linear linear;
};
TORCH_MODULE(MakesTensors);

// peer: ddp `ddp_new_tensor_in_fwd` (+static_graph): same
TEST(Programs, MayMakeTensorsInTheForward) {
  for (const DataParallelOptions& options :
       {DataParallelOptions{}, DataParallelOptions{.find_unused_parameters = true},
        DataParallelOptions{.static_graph = true}}) {
    on_ranks(2, [&](const Rank& self) {
      MakesTensors mine, alone;
      fill(*mine), fill(*alone);
      DistributedDataParallel model(mine, self.group, options);
      const auto loss = [](const std::vector<at::Tensor>& outputs) {
        EXPECT_FALSE(outputs[1].requires_grad());
        return (outputs[0] * outputs[1]).pow(2).sum() + outputs[2].sum();
      };
      for (int step = 0; step < 6; ++step) {
        const auto input = [&](int rank) { return values({3, 2}, rank + step); };
        const Tensors wanted = average_alone(*alone, 2, [&](int rank) { return loss(alone(input(rank))); });
        mine->zero_grad();
        loss(model(input(self.rank))).backward();
        expect_gradients(*mine, wanted);
      }
    });
  }
}

// peer: ddp ddp_forward_backward_hook: same, with tensor hooks: C++ modules have none
TEST(Programs, MayHookTensorsThatRunBeforeTheReduction) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear mine(2, 2);
    fill(*mine);
    DistributedDataParallel model(mine, self.group);
    if (self.rank == 0) mine->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
    const at::Tensor output = model(at::ones({1, 2}));
    bool seen = false;
    output.register_hook([&](const at::Tensor& gradient) {
      seen = true;
      return gradient * 2;
    });
    output.sum().backward();
    EXPECT_TRUE(seen);
    expect_close(mine->weight.grad(), at::full({2, 2}, (3 * 2 + 2) / 2.0), 1e-6);
    expect_close(mine->bias.grad(), at::full({2}, 2.0), 1e-6);
  });
}

// peer: ddp (Horovod) clipping after synchronization: same
TEST(Programs, MayClipTheAverage) {
  for (const bool view : {true, false}) {
    on_ranks(2, [&](const Rank& self) {
      nn::Linear mine(4, 3), whole(4, 3);
      fill(*mine), fill(*whole);
      DistributedDataParallel model(mine, self.group, {.gradient_as_bucket_view = view});
      torch::optim::Adam optimizer(mine->parameters(), 0.01), oracle(whole->parameters(), 0.01);
      for (int step = 0; step < 4; ++step) {
        const at::Tensor input = values({6, 4}, step);
        optimizer.zero_grad(), oracle.zero_grad();
        (model(input.narrow(0, 3 * self.rank, 3)).pow(2).sum() * 2).backward();
        whole(input).pow(2).sum().backward();
        nn::utils::clip_grad_norm_(mine->parameters(), 0.5);
        nn::utils::clip_grad_norm_(whole->parameters(), 0.5);
        optimizer.step(), oracle.step();
        expect_close(mine->weight.detach(), whole->weight.detach(), 1e-5);
      }
    });
  }
}

// peer: ddp (documented) `init_sync=False`: same
TEST(Programs, WithoutAnInitialSyncKeepWhatEachRankHas) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear mine(1, 1);
    const at::NoGradGuard no_grad;
    mine->weight.fill_(self.rank);
    DistributedDataParallel model(mine, self.group, {.initial_sync = false});
    EXPECT_EQ(mine->weight.item<int>(), self.rank);
    model.synchronize_state(1);
    EXPECT_EQ(mine->weight.item<int>(), 1);
  });
}

// peer: ddp process group swapped after a backward that failed, `ddp_has_finalized`: same: the module is
//   wrapped again; the other ranks get the reason
TEST(Programs, MayWrapTheModuleAgainAfterItsGroupBroke) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear mine(2, 2), alone(2, 2);
    fill(*mine), fill(*alone);
    {
      DistributedDataParallel broken(mine, self.group.split(0, self.rank));
      broken(values({1, 2}, 0)).sum().backward();
      self.group.barrier();  // another rank may still be at the end of that step
      if (self.rank == 1) broken.reducer().group().abort(Error(ErrorKind::kCancelled, "enough of this"));
      self.group.barrier();
      const std::string text = error_text([&] { broken(values({1, 2}, 0)).sum().backward(); });
      EXPECT_NE(text.find("enough of this"), std::string::npos) << text;
    }
    DistributedDataParallel model(mine, self.group);
    for (int step = 0; step < 3; ++step) {
      const auto input = [&](int rank) { return values({3, 2}, rank + step); };
      const Tensors wanted =
          average_alone(*alone, 2, [&](int rank) { return alone(input(rank)).pow(2).sum(); });
      mine->zero_grad();
      model(input(self.rank)).pow(2).sum().backward();
      expect_gradients(*mine, wanted);
    }
  });
}

/// Hooks of the wrapper may still be called after its destruction.
// peer: ddp process group swapped after a backward that failed
TEST(Programs, MayDestroyTheWrapperInsideABackwardPass) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    on_ranks(
        2,
        [](const Rank& self) {
          nn::Sequential mine(nn::Linear(2, 2), nn::Tanh(), nn::Linear(2, 2));
          auto model = std::make_unique<DistributedDataParallel<nn::Sequential>>(
              mine, self.group, DataParallelOptions{.bucket_cap_mb = 1e-6, .first_bucket_mb = 1e-6});
          const at::Tensor output = model->forward(values({3, 2}, self.rank));
          if (self.rank == 0)
            mine->parameters()[0].register_hook([&](const at::Tensor& gradient) {
              model.reset();
              return gradient;
            });
          if (self.rank == 0) return output.sum().backward();
          const std::string text = error_text([&] { output.sum().backward(); });
          EXPECT_NE(text.find("rank 0 gave up"), std::string::npos) << text;
          EXPECT_NE(text.find("destroyed"), std::string::npos) << text;
        },
        seed);
  }
}

// peer: ddp (documented) parameters that change after construction
TEST(Programs, ThatReplaceAParameterFailByName) {
  on_ranks(2, [](const Rank& self) {
    nn::Linear mine(2, 2);
    DistributedDataParallel model(mine, self.group);
    mine->weight = leaf({2, 2});
    const std::string text = error_text([&] { model(values({1, 2}, 0)).sum().backward(); });
    EXPECT_NE(text.find("left 1 of 2 parameters without a gradient"), std::string::npos) << text;
    EXPECT_NE(text.find("'weight'"), std::string::npos) << text;
  });
}

// peer: ddp broadcast_coalesced_gloo_cpu: same
TEST(Broadcast, TakesTensorsOfAllDtypesAndStridesInMessagesOfAnySize) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{40}, std::size_t{1} << 20}) {
    for (int root = 0; root < 3; ++root) {
      on_ranks(3, [&](const Rank& self) {
        const auto made = [](int rank) {
          return Tensors{values({3, 2}, rank),
                         values({5}, rank, at::kDouble),
                         at::full({2, 2}, rank, at::kLong),
                         at::full({3}, rank == 1, at::kBool),
                         values({4, 3}, rank).t(),
                         at::empty({0, 2}),
                         values({}, rank, at::kHalf),
                         values({2, 3, 4, 5}, rank).contiguous(at::MemoryFormat::ChannelsLast)};
        };
        const Tensors mine = made(self.rank), wanted = made(root);
        const auto strides = mine[4].strides().vec();
        broadcast_coalesced(self.group, mine, root, bytes);
        for (std::size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::equal(mine[i], wanted[i])) << i;
        EXPECT_EQ(mine[4].strides(), strides);
      });
    }
  }
}

}  // namespace
}  // namespace torchspan::data_parallel::programs_test
