#include <gtest/gtest.h>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel.h>

#include "data_parallel/toy_model.h"

namespace torchspan::data_parallel::buffer_hooks_test {
namespace {

using namespace testing;
namespace nn = torch::nn;

/// Its forward adds its input to one buffer, and 1 to an integer buffer.
struct CounterImpl : nn::Module {
  CounterImpl() {
    weight = register_parameter("weight", at::ones({2}));
    seen = register_buffer("seen", at::zeros({2}));
    calls = register_buffer("calls", at::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen_at_forward.push_back(seen.clone());
    seen.add_(x);
    calls.add_(1);
    return weight * x + seen;
  }
  at::Tensor weight, seen, calls;
  std::vector<at::Tensor> seen_at_forward;
};
TORCH_MODULE(Counter);

at::Tensor fed(double value) { return at::full({2}, value); }

/// Averages the buffers that are floats; does not change the others.
std::vector<Future<at::Tensor>> average_floats(const std::vector<NamedBuffer>& buffers,
                                               const collective::Group& group) {
  std::vector<Future<at::Tensor>> futures;
  for (const NamedBuffer& buffer : buffers) {
    if (buffer.tensor.is_floating_point())
      futures.push_back(group.all_reduce(buffer.tensor, collective::kAvg));
  }
  return futures;
}

// peer: ddp ddp_buffer_hook_allreduce, _return_future: same; a hook before the forward is waited for, which
//   the peer's is not
TEST(BufferHook, AfterForwardAveragesBuffersByTheEndOfBackward) {
  on_ranks(3, [](const Rank& self) {
    Counter net;
    DistributedDataParallel model(net, self.group);
    std::vector<std::string> names;
    model.set_buffer_hook(
        [&](const std::vector<NamedBuffer>& buffers, const collective::Group& group) {
          names.clear();
          for (const NamedBuffer& buffer : buffers) names.push_back(buffer.name);
          return average_floats(buffers, group);
        },
        "average");
    double before = 0;
    for (int i = 0; i < 3; ++i) {
      net->zero_grad();
      model(fed(self.rank + i)).sum().backward();
      EXPECT_EQ(net->seen_at_forward.back()[0].item<double>(), before) << "nothing before the forward";
      before += 1 + i;  // the three ranks add different values to equal buffers; this is their average
      expect_close(net->seen, fed(before), 1e-6);
      EXPECT_EQ(net->calls.item<int>(), i + 1);
      expect_close(net->weight.grad(), fed(1 + i), 1e-6);
    }
    EXPECT_EQ(names, (std::vector<std::string>{"seen", "calls"}));
  });
}

// peer: ddp ddp_broadcast_buffer_via_hook
TEST(BufferHook, BeforeForwardRunsBeforeTheForwardReadsBuffers) {
  on_ranks(2, [](const Rank& self) {
    Counter net;
    DistributedDataParallel model(net, self.group);
    model.set_buffer_hook(average_floats, "average", BufferHookTime::kBeforeForward);
    model(fed(2 * self.rank)).sum().backward();
    expect_close(net->seen, fed(2 * self.rank), 1e-6);  // not reduced after that
    model(fed(0)).sum().backward();
    expect_close(net->seen_at_forward[1], fed(1), 1e-6);
  });
}

/// A hook that broadcasts rank 0's buffers has the effect of the default.
// peer: ddp ddp_broadcast_buffer_via_hook: same
TEST(BufferHook, ThatBroadcastsIsTheDefault) {
  for (const auto when : {BufferHookTime::kBeforeForward, BufferHookTime::kAfterForward}) {
    on_ranks(3, [&](const Rank& self) {
      nn::BatchNorm1d hooked(2), plain(2);
      DistributedDataParallel one(hooked, self.group), other(plain, self.group);
      one.set_buffer_hook(
          [](const std::vector<NamedBuffer>& buffers, const collective::Group& group) {
            std::vector<Future<at::Tensor>> futures;
            for (const NamedBuffer& buffer : buffers) futures.push_back(group.broadcast(buffer.tensor, 0));
            return futures;
          },
          "broadcast", when);
      for (int i = 0; i < 3; ++i) {
        const at::Tensor input = at::arange(8, at::kFloat).add(self.rank * (i + 1)).sin().reshape({4, 2});
        one(input).pow(2).sum().backward();
        other(input).pow(2).sum().backward();
      }
      if (when == BufferHookTime::kAfterForward) {
        const auto means = self.group.all_gather(hooked->running_mean).wait();
        for (const auto& mean : means) EXPECT_TRUE(at::equal(mean, means[0]));
        return;
      }
      EXPECT_TRUE(at::equal(hooked->running_mean, plain->running_mean));
      EXPECT_TRUE(at::equal(hooked->running_var, plain->running_var));
    });
  }
}

/// Batch norm saves its running mean for backward, and hooks write to it.
// peer: ddp ddp_buffer_hook_allreduce
TEST(BufferHook, DoesNotDisturbTheGraphsOfEarlierForwards) {
  for (const auto when : {BufferHookTime::kBeforeForward, BufferHookTime::kAfterForward}) {
    on_ranks(2, [&](const Rank& self) {
      nn::BatchNorm1d net(2);
      DistributedDataParallel model(net, self.group);
      model.set_buffer_hook(average_floats, "average", when);
      const auto input = [&](int i) { return at::arange(8, at::kFloat).add(i + self.rank).reshape({4, 2}); };
      const at::Tensor real = model(input(0)), fake = model(input(5));
      EXPECT_NO_THROW((real.pow(2).sum() + fake.pow(3).sum()).backward());
    });
  }
}

/// Under no_sync and without gradients, the other ranks do not take part.
// peer: ddp (documented) a buffer hook under `no_sync`, without gradients, twice, beside `join`: better:
//   rejected if ranks differ, or if it would never be called
TEST(BufferHook, IsNotCalledUnderNoSyncOrWithoutGradMode) {
  on_ranks(2, [](const Rank& self) {
    Counter net;
    DistributedDataParallel model(net, self.group);
    int calls = 0;
    model.set_buffer_hook(
        [&](const std::vector<NamedBuffer>& buffers, const collective::Group& group) {
          ++calls;
          return average_floats(buffers, group);
        },
        "average");
    {
      const auto guard = model.no_sync();
      model(fed(1)).sum().backward();
    }
    {
      const at::NoGradGuard no_grad;
      model(fed(1));
    }
    EXPECT_EQ(calls, 0);
    model(fed(1));  // no backward follows; the next forward waits for the buffers
    model(fed(1)).sum().backward();
    EXPECT_EQ(calls, 2);
  });
}

// peer: ddp ddp_buffer_hook_allreduce
TEST(BufferHook, ThatFailsFailsThePassItBelongsTo) {
  for (const auto when : {BufferHookTime::kBeforeForward, BufferHookTime::kAfterForward}) {
    on_ranks(2, [&](const Rank& self) {
      Counter net;
      DistributedDataParallel model(net, self.group);
      bool fails = true;
      model.set_buffer_hook(
          [&](const std::vector<NamedBuffer>& buffers, const collective::Group& group) {
            auto futures = average_floats(buffers, group);
            futures.push_back(futures[0].then([fails](const Future<at::Tensor>& done) {
              if (fails) throw Error(ErrorKind::kInvalid, "the hook failed");
              return done.wait();
            }));
            return futures;
          },
          "the hook failed", when);
      const std::string text = error_text([&] { model(fed(1)).sum().backward(); });
      EXPECT_NE(text.find("the hook failed"), std::string::npos) << text;
      fails = false;
      net->zero_grad();
      model(fed(1 + self.rank)).sum().backward();
      expect_close(net->weight.grad(), fed(1.5), 1e-6);
    });
  }
}

// peer: ddp ddp_buffer_hook_allreduce
TEST(BufferHook, ThatFailsWithoutABackwardFailsTheNextForward) {
  on_ranks(2, [](const Rank& self) {
    Counter net;
    DistributedDataParallel model(net, self.group);
    model.set_buffer_hook(
        [](const std::vector<NamedBuffer>&, const collective::Group&) {
          return std::vector{make_failed_future<at::Tensor>(
              std::make_exception_ptr(Error(ErrorKind::kInvalid, "the hook failed")))};
        },
        "the hook failed");
    model(fed(1));
    const std::string text = error_text([&] { model(fed(1)); });
    EXPECT_NE(text.find("the hook failed"), std::string::npos) << text;
  });
}

// peer: ddp (documented) a buffer hook under no_sync
TEST(BufferHook, IsSetOnceEquallyOnAllRanksAndWithoutConflictingOptions) {
  on_ranks(2, [](const Rank& self) {
    Counter net;
    DistributedDataParallel model(net, self.group);
    const auto refused = [&](const std::string& text, const std::function<void()>& body) {
      const std::string heard = error_text(body);
      EXPECT_NE(heard.find(text), std::string::npos) << heard;
    };
    refused("'another'", [&] { model.set_buffer_hook(average_floats, self.rank == 0 ? "one" : "another"); });
    refused("before forward on rank 0 and after forward on rank 1", [&] {
      model.set_buffer_hook(average_floats, "one",
                            self.rank == 0 ? BufferHookTime::kBeforeForward : BufferHookTime::kAfterForward);
    });
    refused("empty", [&] { model.set_buffer_hook(nullptr, "none"); });
    model.set_buffer_hook(average_floats, "one");
    refused("already", [&] { model.set_buffer_hook(average_floats, "one"); });
    refused("buffer hook", [&] { model.join([] {}); });
    Counter other;
    DistributedDataParallel apart(other, self.group, {.broadcast_buffers = false});
    refused("broadcast_buffers is false", [&] { apart.set_buffer_hook(average_floats, "one"); });
  });
}

}  // namespace
}  // namespace torchspan::data_parallel::buffer_hooks_test
