// Streams of devices in a pass, over the stand-in devices, which report every access that nothing orders, or on GPUs.
#include "engine/streams.h"

#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <random>

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/torch.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/pool.h>

#include "engine/api/grad_field_sink.h"
#include "engine/oracle.h"
#include "engine/test_nodes.h"
#include "tests/support/environment.h"
#include "tests/support/test_device.h"

namespace torchspan::engine::streams_test {
namespace {

using namespace testing;
using ::testing::IsEmpty;
using torch::autograd::variable_list;
using torchspan::testing::keep_busy;
using torchspan::testing::on_cuda;
using torchspan::testing::StandInStreams;
using torchspan::testing::TestDevices;

/// With one GPU, both devices are this one.
c10::Device test_device(int index) { return torchspan::testing::test_device_or_first(index); }
c10::Stream side_stream(int device = 0) { return device::stream_from_pool(test_device(device)); }
c10::Stream main_stream(int device = 0) { return device::default_stream(test_device(device)); }
/// Another stream than the default one, which is busy.
c10::Stream busy_stream(int device = 0) {
  const c10::Stream stream = side_stream(device);
  keep_busy(stream);
  return stream;
}

/// The value that the CPU computed. GPUs round some functions in another way.
void expect_value(const Tensor& ours, const Tensor& wanted) {
  if (!on_cuda()) return expect_identical(ours, wanted);
  ASSERT_EQ(ours.defined(), wanted.defined());
  if (ours.defined()) {
    EXPECT_TRUE(at::allclose(ours, wanted, 1e-10, 1e-12)) << ours << wanted;
  }
}

void order(const c10::Stream& earlier, const c10::Stream& later) {
  device::EventPool events;
  device::order_after(later, earlier, events);
}

/// Runs operations on streams as a careful program does: a stream waits for the streams of its inputs, and their
/// memory is kept for it.
class Forward {
 public:
  Tensor on(const c10::Stream& stream, const std::vector<Tensor>& inputs,
            const std::function<Tensor()>& body) {
    for (const Tensor& input : inputs) {
      const auto made_on = streams_.find(input.unsafeGetTensorImpl());
      order(made_on == streams_.end() ? main_stream(input.device().index()) : made_on->second, stream);
      device::keep_memory_for(input, stream);
    }
    keep_busy(stream);
    const c10::StreamGuard guard(stream);
    const Tensor made = body();
    streams_.emplace(made.unsafeGetTensorImpl(), stream);
    kept_.push_back(made);
    return made;
  }

 private:
  std::map<c10::TensorImpl*, c10::Stream> streams_;
  std::vector<Tensor> kept_;
};

class EngineStreams : public ::testing::Test {
 protected:
  void SetUp() override { TestDevices::reset(); }
  ~EngineStreams() override {
    pool_->stop();
    EXPECT_THAT(TestDevices::take_races(), IsEmpty());
    TestDevices::synchronize();
  }

  /// Runs `job` on another thread, whose current streams are the default ones.
  void elsewhere(const std::function<void()>& job) {
    Promise<void> done(pool_);
    pool_->post([&] {
      job();
      done.set_value();
    });
    done.future().wait();
  }
  static Tensor leaf(double value, int device = 0) {
    return at::full({4}, value, at::kDouble).to(test_device(device)).requires_grad_();
  }

  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(*executor_, PoolOptions{.threads = 4});
};

/// Takes gradients of both devices at once, and gives them to two leaves.
struct AcrossDevices : torch::autograd::Node {
  explicit AcrossDevices(torch::autograd::edge_list edges) : Node(std::move(edges)) {}
  variable_list apply(variable_list&& gradients) override { return {gradients[0] * 2, gradients[1] * 3}; }
};

TEST_F(EngineStreams, OrderGradientsOfTheOtherDevicesOfANode) {
  if (const auto missing = TestDevices::missing(2); !missing.empty()) GTEST_SKIP() << missing;
  const Tensor x = leaf(1, 0), y = leaf(2, 1);
  const c10::Stream a = side_stream(0), b = side_stream(1), c = side_stream(1);
  Forward forward;
  Tensor first, second;
  {
    const c10::StreamGuard on_second(b), on_first(a);
    auto node = make_node<AcrossDevices>(torch::autograd::edge_list{torch::autograd::impl::gradient_edge(x),
                                                                    torch::autograd::impl::gradient_edge(y)});
    first = at::ones({4}, x.options()), second = at::ones({4}, y.options());
    torch::autograd::create_gradient_edge(first, node);
    torch::autograd::create_gradient_edge(second, node);
  }
  order(a, main_stream(0));
  order(b, c);
  Tensor scaled;
  {
    const c10::StreamGuard guard(c);
    scaled = second * 5;
    device::keep_memory_for(second, c);
  }
  GradientMap gradients;
  MapSink sink(gradients);
  order(c, main_stream(1));
  backward({first, scaled},
           {at::ones({4}, x.options().requires_grad(false)), at::ones({4}, y.options().requires_grad(false))},
           sink);
  expect_identical(gradients.gradient(x).cpu(), at::full({4}, 2.0, at::kDouble));
  expect_identical(gradients.gradient(y).cpu(), at::full({4}, 15.0, at::kDouble));
}

TEST_F(EngineStreams, ThreadsThatDriveAPassUseItsCallersStreams) {
  const Tensor x = leaf(3);
  const c10::Stream caller = busy_stream(), used = side_stream();
  order(main_stream(), used);
  Forward forward;
  const Tensor y = forward.on(used, {x}, [&] { return x * x; });
  GradientMap gradients;
  MapSink sink(gradients);
  const c10::StreamGuard guard(caller);
  order(used, caller);
  auto pass = std::make_shared<GraphPass>(sink);
  pass->add_root(y, at::ones({4}, at::kDouble).to(test_device(0)) * 2);  // made on the caller's stream
  pass->prepare();
  elsewhere([&] { pass->run(); });
  expect_identical(gradients.gradient(x).cpu(), at::full({4}, 12.0, at::kDouble));
}

TEST_F(EngineStreams, DeliveredGradientsAreOrderedAfterTheDeliveringThreadsStreams) {
  const Tensor x = leaf(3);
  auto root = make_node<Outgoing>(std::vector<Tensor>{x * 1});
  GradientMap gradients;
  MapSink sink(gradients);
  auto pass = std::make_shared<GraphPass>(sink);
  pass->add_pending(root);
  pass->prepare();
  elsewhere([&] {
    const c10::StreamGuard guard(busy_stream());
    pass->deliver(*root, variable_list{at::ones({4}, at::kDouble).to(test_device(0)) * 7});
  });
  pass->run();
  expect_identical(gradients.gradient(x).cpu(), at::full({4}, 7.0, at::kDouble));
}

/// Stores the gradient that arrives at a leaf, and may throw then.
struct LeafHook : GradientHook {
  LeafHook(const Tensor& parameter, Tensor& seen, bool throws)
      : GradientHook(parameter, std::make_shared<NativeEnginePasses>()), seen(seen), throws(throws) {}
  void gradient_ready(GradientSink& sink, const Tensor& parameter) override {
    seen = sink.gradient(parameter) * 10;  // on the stream of the leaf
    if (throws) throw std::runtime_error("the hook threw");
  }
  Tensor& seen;
  const bool throws;
};

TEST_F(EngineStreams, TheEndOfAPassFollowsTheStreamsOfItsLeaves) {
  for (const bool throws : {false, true}) {
    const Tensor x = leaf(3);
    const c10::Stream caller = side_stream(), used = side_stream();
    Forward forward;
    const Tensor y = forward.on(used, {x}, [&] { return x * 4; });
    Tensor seen, read;
    const auto node = torch::autograd::impl::grad_accumulator(x);
    const auto key = node->add_post_hook(std::make_unique<LeafHook>(x, seen, throws));
    GradientMap gradients;
    MapSink sink(gradients);
    order(used, caller);
    bool failed = false;
    sink.after_pass([&](const PassStatus& status) {
      failed = !status.ok();
      read = seen + 1;  // on the caller's stream
      EXPECT_EQ(device::current_stream(test_device(0)), caller);
    });
    std::shared_ptr<GraphPass> pass;
    {
      const c10::StreamGuard guard(caller);
      pass = std::make_shared<GraphPass>(sink);
      pass->add_root(y, at::ones({4}, at::kDouble).to(test_device(0)));
    }
    pass->prepare();
    elsewhere([&] { pass->run(); });
    EXPECT_EQ(failed, throws);
    order(caller, main_stream());
    expect_identical(read.cpu(), at::full({4}, 41.0, at::kDouble));
    node->del_post_hook(key);
    TestDevices::synchronize();
  }
}

TEST_F(EngineStreams, CallbacksAfterHeldFuturesRunOnTheCallersStreams) {
  const Tensor x = leaf(3);
  const c10::Stream caller = side_stream();
  Promise<void> work(std::weak_ptr<ContinuationExecutor>{});
  GradientMap gradients;
  MapSink sink(gradients);
  sink.hold(work.future());
  std::atomic<int> calls{0};
  const auto check = [&](const PassStatus&) {
    ++calls;
    EXPECT_EQ(device::current_stream(test_device(0)), caller);
  };
  sink.before_end(check);
  sink.after_pass(check);
  {
    order(main_stream(), caller);
    const c10::StreamGuard guard(caller);
    GraphPass pass(sink);
    pass.add_root((x * 2).sum());
    pass.prepare();
    pass.run();
  }
  elsewhere([&] { work.set_value(); });
  EXPECT_EQ(calls, 2);
  TestDevices::synchronize();
}

TEST_F(EngineStreams, SumsWaitForContributionsThatWerePutAside) {
  // Three branches on three streams lead to one node. Their gradients come in an order that is not that of the
  // sum, so that some are added while the stream of another node is current.
  const Tensor x = leaf(2);
  Forward forward;
  const c10::Stream home = side_stream();
  const Tensor shared = forward.on(home, {x}, [&] { return x * 3; });
  std::vector<NodePtrTo<Outgoing>> roots;
  for (int i = 1; i <= 3; ++i) {
    const c10::Stream branch = side_stream();
    const Tensor made = forward.on(branch, {shared}, [&] { return shared * i; });
    const c10::StreamGuard guard(branch);
    roots.push_back(make_node<Outgoing>(std::vector<Tensor>{made}));
  }
  GradientMap gradients;
  MapSink sink(gradients);
  GraphPass pass(sink);
  for (const auto& root : roots) pass.add_pending(root);
  pass.prepare();
  for (const auto& root : roots) {
    pass.deliver(*root, variable_list{at::ones({4}, at::kDouble).to(test_device(0))});
    pass.run();
  }
  EXPECT_TRUE(pass.finished());
  expect_identical(gradients.gradient(x).cpu(), at::full({4}, 18.0, at::kDouble));
}

TEST_F(EngineStreams, ReadersOfAGradientWaitForAllPassesThatAddedToIt) {
  const Tensor x = leaf(2);
  GradientMap gradients;
  const c10::Stream first = busy_stream(), second = busy_stream(), reader = busy_stream();
  for (const c10::Stream& stream : {first, second}) {
    order(main_stream(), stream);
    const c10::StreamGuard guard(stream);
    gradients.accumulate(x, at::ones({4}, at::kDouble).to(test_device(0)) * 5);
  }
  {
    const c10::StreamGuard guard(reader);
    const Tensor step = gradients.gradient(x) * 2;
    EXPECT_EQ(gradients.gradients().size(), 1);
    gradients.gradients()[0].gradient + step;
  }
  // The reader may still run: the next sum, which is in place, waits for it.
  {
    const c10::StreamGuard guard(first);
    gradients.accumulate(x, at::ones({4}, at::kDouble).to(test_device(0)));
  }
  expect_identical(gradients.gradient(x).cpu(), at::full({4}, 11.0, at::kDouble));
}

TEST_F(EngineStreams, KeepTheMemoryOfAllPartsOfSparseTensors) {
  const auto parts = [](const Tensor& tensor) {
    int count = 0;
    device::visit_parts(tensor, [&](const Tensor& part) { count += part.has_storage() ? 1 : 0; });
    return count;
  };
  const Tensor dense = at::eye(4);
  EXPECT_EQ(parts(dense), 1);
  EXPECT_EQ(parts(dense.to_sparse()), 2);
  EXPECT_EQ(parts(dense.to_sparse_csr()), 3);
  EXPECT_EQ(parts(dense.to_sparse_bsr({2, 2})), 3);
  // The stand-in throws if memory of one device is recorded on a stream of another.
  device::keep_memory_for(leaf(1, 0), side_stream(1));
}

TEST_F(EngineStreams, ReuseEvents) {
  if (const auto missing = TestDevices::missing(1, /*needs_stand_ins=*/true); !missing.empty())
    GTEST_SKIP() << missing;
  Forward forward;
  const Tensor x = leaf(1);
  Tensor y = x;
  for (int i = 0; i < 50; ++i) y = forward.on(side_stream(), {y}, [&] { return y * 1; });
  GradientMap gradients;
  MapSink sink(gradients);
  const std::size_t before = StandInStreams::get().events_made();
  order(device::current_stream(test_device(0)), main_stream());
  backward({forward.on(main_stream(), {y}, [&] { return y.sum(); })}, {}, sink);
  EXPECT_LE(StandInStreams::get().events_made() - before, 6);
}

/// A random graph over two devices and several streams of each; the same operations for the same seed. With
/// `devices` false, on the CPU.
std::vector<Tensor> random_graph(std::uint32_t seed, const std::vector<Tensor>& leaves, bool devices) {
  std::mt19937 random(seed);
  const auto draw = [&](std::size_t below) { return random() % below; };
  Forward forward;
  std::vector<std::vector<c10::Stream>> streams(2);
  for (int device = 0; device < 2; ++device) {
    for (int i = 0; i < 3; ++i)
      streams[device].push_back(devices ? side_stream(device) : c10::Stream(c10::Stream::DEFAULT, c10::kCPU));
  }
  std::vector<Tensor> pool = leaves;
  std::vector<std::size_t> places{0, 1, 0};
  for (int step = 0; step < 25; ++step) {
    const std::size_t a = draw(pool.size()), kind = draw(6), stream = draw(3), b = draw(pool.size());
    std::size_t place = places[a];
    const auto run = [&](const Tensor& x, const Tensor& z) {
      switch (kind) {
        case 0:
          return x * z;
        case 1:
          return x + z;
        case 2:
          return x.tanh();
        case 3:
          return x.matmul(z) / 3;
        default:
          return x.sum().expand({3, 3}) * 0.1;
      }
    };
    const Tensor x = pool[a], z = places[b] == place ? pool[b] : pool[a];
    if (kind == 5) place = 1 - place;
    Tensor made;
    if (!devices) {
      made = kind == 5 ? x.clone() : run(x, z);
    } else if (kind == 5) {
      const c10::Stream from = streams[1 - place][stream];
      forward.on(from, {x}, [&] {
        made = forward.on(streams[place][stream], {},
                          [&] { return x.to(test_device(static_cast<int>(place))); });
        return x;
      });
    } else {
      made = forward.on(streams[place][stream], {x, z}, [&] { return run(x, z); });
    }
    pool.push_back(made);
    places.push_back(place);
  }
  std::vector<Tensor> roots;
  for (std::size_t i = pool.size() - 3; i < pool.size(); ++i) {
    const Tensor x = pool[i];
    roots.push_back(devices
                        ? forward.on(main_stream(static_cast<int>(places[i])), {x}, [&] { return x.sum(); })
                        : x.sum());
  }
  return roots;
}

TEST_F(EngineStreams, GiveTheGradientsOfTheCpuOnRandomGraphs) {
  const auto cases = torchspan::testing::number_from("TORCHSPAN_CASES", 20u);
  for (std::uint32_t seed = 1; seed <= cases; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    torch::manual_seed(seed);
    std::vector<Tensor> values, here, there;
    for (int i = 0; i < 3; ++i) {
      values.push_back(at::randn({3, 3}, at::kDouble));
      here.push_back(values[i].clone().requires_grad_());
      there.push_back(values[i].to(test_device(i % 2)).requires_grad_());
    }
    torch::autograd::backward(random_graph(seed, here, false), {});
    const auto roots = random_graph(seed, there, true);
    for (const unsigned threads : {1u, 4u}) {
      GradientMap gradients;
      MapSink sink(gradients);
      PassOptions options;
      options.retain_graph = threads == 1;
      options.threads = threads;
      options.enlist = [this](UniqueFunction<void()> job) { pool_->post(std::move(job)); };
      const auto pass = std::make_shared<GraphPass>(sink, options);
      Promise<void> ended(pool_);
      sink.after_pass(
          [&](const PassStatus& status) { status.ok() ? ended.set_value() : ended.set_error(status.error); });
      for (const Tensor& root : roots) pass->add_root(root);
      pass->prepare();
      pass->run();
      ended.future().wait();
      for (int i = 0; i < 3; ++i) {
        const Tensor ours = gradients.gradient(there[i]);
        expect_value(ours.defined() ? ours.cpu() : ours, here[i].grad());
      }
    }
    ASSERT_THAT(TestDevices::take_races(), IsEmpty());
    TestDevices::synchronize();
  }
}

}  // namespace
}  // namespace torchspan::engine::streams_test
