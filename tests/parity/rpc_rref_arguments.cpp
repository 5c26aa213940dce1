// RRefs as arguments and results: in every position, along chains, and with the destruction of the value at
// the end.
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_rref_arguments {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

using Number = RRef<std::int64_t>;

struct Lives {
  int made = 0;
  int alive = 0;
};
/// Counts its instances; cannot be sent.
class Tracked {
 public:
  Tracked(Lives& lives, std::int64_t number) : lives_(&lives), number_(number) {
    ++lives.made;
    ++lives.alive;
  }
  Tracked(Tracked&& other) noexcept : lives_(std::exchange(other.lives_, nullptr)), number_(other.number_) {}
  ~Tracked() {
    if (lives_ != nullptr) --lives_->alive;
  }
  std::int64_t number() const { return number_; }

 private:
  Lives* lives_;
  std::int64_t number_;
};

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t slow_seven(Worker& worker) {
  nap(worker, milliseconds(200));
  return 7;
}
std::int64_t read(const Number& rref) { return rref.to_here(); }
std::int64_t add_rrefs(const Number& a, const Number& b) { return a.to_here() + b.to_here(); }
bool is_confirmed(const Number& rref) { return rref.confirmed_by_owner(); }
Number nested_remote(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b);
std::vector<Number> nested_rrefs(Worker& worker, const WorkerInfo& to, std::int64_t count);
Number make_local(Worker& worker, std::int64_t value) { return Number(worker, value); }
std::vector<Number> make_locals(Worker& worker, std::int64_t count) {
  std::vector<Number> all;
  for (std::int64_t i = 0; i < count; ++i) all.emplace_back(worker, i);
  return all;
}
std::int64_t sum_of(const std::vector<Number>& all) {
  std::int64_t sum = 0;
  for (const Number& one : all) sum += one.to_here();
  return sum;
}
Number same(const Number& rref) { return rref; }
std::vector<Number> forward_chain(Worker& worker, const Number& rref, std::int64_t left);
Tracked make_tracked(Worker& worker, std::int64_t number) { return Tracked(state_of<Lives>(worker), number); }
std::int64_t read_tracked(const RRef<Tracked>& tracked);
struct Holder {
  explicit Holder(const Number& held) : held(held) {}
  std::int64_t read() const { return held.to_here(); }
  Number held;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<slow_seven> kSlowSeven{"slow_seven"};
constexpr Function<read> kRead{"read"};
constexpr Function<add_rrefs> kAddRrefs{"add_rrefs"};
constexpr Function<is_confirmed> kIsConfirmed{"is_confirmed"};
constexpr Function<nested_remote> kNestedRemote{"nested_remote"};
constexpr Function<nested_rrefs> kNestedRrefs{"nested_rrefs"};
constexpr Function<make_local> kMakeLocal{"make_local"};
constexpr Function<make_locals> kMakeLocals{"make_locals"};
constexpr Function<sum_of> kSumOf{"sum_of"};
constexpr Function<same> kSame{"same"};
constexpr Function<forward_chain> kForwardChain{"forward_chain"};
constexpr Function<make_tracked> kMakeTracked{"make_tracked"};
constexpr Function<&Tracked::number> kTrackedNumber{"Tracked.number"};
constexpr Function<read_tracked> kReadTracked{"read_tracked"};
constexpr Class<Holder, Number> kHolder{"Holder"};
constexpr Function<&Holder::read> kHolderRead{"Holder.read"};

Number nested_remote(Worker& worker, const WorkerInfo& to, std::int64_t a, std::int64_t b) {
  return worker.remote(to, kAdd, a, b);
}
std::vector<Number> nested_rrefs(Worker& worker, const WorkerInfo& to, std::int64_t count) {
  std::vector<Number> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(worker.remote(to, kAdd, i, 1));
  return all;
}
std::vector<Number> forward_chain(Worker& worker, const Number& rref, std::int64_t left) {
  if (left == 0) return {rref};
  auto all = worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kForwardChain, rref, left - 1);
  all.push_back(rref);
  return all;
}
std::int64_t read_tracked(const RRef<Tracked>& tracked) { return tracked.rpc_sync(kTrackedNumber); }

ClusterOptions world(int workers = 3) {
  return world_of(workers,
                  FunctionTable().add(kAdd, kSlowSeven, kRead, kAddRrefs, kIsConfirmed, kNestedRemote,
                                      kNestedRrefs, kMakeLocal, kMakeLocals, kSumOf, kSame, kForwardChain,
                                      kMakeTracked, kTrackedNumber, kReadTracked, kHolder, kHolderRead));
}

std::string next(const Worker& worker, std::uint32_t by = 1) {
  return SimCluster::name(static_cast<int>((worker.rank() + by) % worker.world_size()));
}

// peer: rpc_test.py/rref py_rref_args: same
TEST(RpcConformance, PyRrefArgs) {
  on_all(world(), [](Worker& worker) {
    auto a = worker.remote(next(worker), kAdd, 1, 2);
    auto b = worker.remote(next(worker), kAdd, 3, 4);
    EXPECT_EQ(worker.remote(next(worker), kAddRrefs, a, b).to_here(), 10);
  });
}

// peer: rpc_test.py/rref py_rref_args_user_share: same
TEST(RpcConformance, PyRrefArgsUserShare) {
  on_all(world(), [](Worker& worker) {
    auto a = worker.remote(next(worker), kSlowSeven);
    auto b = worker.remote(next(worker), kAdd, 3, 4);
    EXPECT_EQ(worker.remote(next(worker, 2), kAddRrefs, a, b).to_here(), 14);
  });
}

// peer: rpc_test.py/rref py_rpc_rref_args: same
TEST(RpcConformance, PyRpcRrefArgs) {
  on_all(world(), [](Worker& worker) {
    auto a = worker.remote(next(worker), kAdd, 1, 2);
    auto b = worker.remote(next(worker, 2), kAdd, 3, 4);
    EXPECT_EQ(worker.rpc_sync(next(worker), kAddRrefs, a, b), 10);
    EXPECT_EQ(worker.rpc_sync(next(worker, 2), kAddRrefs, a, b), 10);
  });
}

// peer: rpc_test.py/rref (documented) another worker's RRef in a worker's call to itself: same
TEST(RpcConformance, UserRrefAsSelfRpcArg) {
  on_all(world(), [](Worker& worker) {
    auto there = worker.remote(next(worker), kAdd, 1, 2);
    EXPECT_EQ(worker.rpc_sync(worker.info(), kRead, there), 3);
  });
}

// peer: rpc_test.py/rref self_remote_rref_as_rpc_arg: same
TEST(RpcConformance, SelfRemoteRrefAsRpcArg) {
  on_all(world(), [](Worker& worker) {
    auto mine = worker.remote(worker.info(), kSlowSeven);
    auto later = worker.rpc_async(next(worker), kAddRrefs, mine, mine);
    EXPECT_EQ(worker.rpc_sync(next(worker), kRead, mine), 7);
    EXPECT_EQ(later.wait(), 14);
  });
}

// peer: rpc_test.py/rref self_remote_rref_as_self_rpc_arg: same
TEST(RpcConformance, SelfRemoteRrefAsSelfRpcArg) {
  on_all(world(), [](Worker& worker) {
    auto mine = worker.remote(worker.info(), kSlowSeven);
    auto later = worker.rpc_async(worker.info(), kAddRrefs, mine, mine);
    EXPECT_EQ(worker.rpc_sync(worker.info(), kRead, mine), 7);
    EXPECT_EQ(later.wait(), 14);
  });
}

// peer: rpc_test.py/rref self_remote_rref_as_remote_arg: same
TEST(RpcConformance, SelfRemoteRrefAsRemoteArg) {
  on_all(world(), [](Worker& worker) {
    auto mine = worker.remote(worker.info(), kSlowSeven);
    EXPECT_EQ(worker.remote(next(worker), kRead, mine).to_here(), 7);
    EXPECT_EQ(worker.remote(next(worker), kHolder, mine).rpc_sync(kHolderRead), 7);
  });
}

// peer: rpc_test.py/rref self_remote_rref_as_self_remote_arg: same
TEST(RpcConformance, SelfRemoteRrefAsSelfRemoteArg) {
  on_all(world(), [](Worker& worker) {
    auto mine = worker.remote(worker.info(), kSlowSeven);
    EXPECT_EQ(worker.remote(worker.info(), kRead, mine).to_here(), 7);
    EXPECT_EQ(worker.remote(worker.info(), kHolder, mine).rpc_sync(kHolderRead), 7);
  });
}

// peer: rpc_test.py/rref nested_remote: same
TEST(RpcConformance, NestedRemote) {
  on_all(world(), [](Worker& worker) {
    auto outer = worker.remote(next(worker), kNestedRemote, worker.info(next(worker, 2)), 1, 2);
    auto inner = outer.to_here();
    EXPECT_EQ(inner.owner_name(), next(worker, 2));
    EXPECT_EQ(inner.to_here(), 3);
  });
}

// peer: rpc_test.py/rref nested_rref: same
TEST(RpcConformance, NestedRref) {
  on_all(world(), [](Worker& worker) {
    auto all = worker.remote(next(worker), kNestedRrefs, worker.info(next(worker, 2)), 2).to_here();
    ASSERT_EQ(all.size(), 2u);
    for (std::int64_t i = 0; i < 2; ++i) EXPECT_EQ(all[i].to_here(), i + 1);
  });
}

// peer: rpc_test.py/rref nested_rref_stress: same
TEST(RpcConformance, NestedRrefStress) {
  on_all(world(), [](Worker& worker) {
    std::vector<RRef<std::vector<Number>>> outer;
    for (int i = 0; i < 20; ++i) {
      outer.push_back(worker.remote(next(worker), kNestedRrefs, worker.info(next(worker, 2)), 2));
    }
    for (const auto& one : outer) {
      const auto inner = one.to_here();
      ASSERT_EQ(inner.size(), 2u);
      EXPECT_EQ(inner[0].to_here() + inner[1].to_here(), 3);
    }
  });
}

// peer: rpc_test.py/rref rpc_return_rref: same
TEST(RpcConformance, RpcReturnRref) {
  on_all(world(), [](Worker& worker) {
    auto made = worker.rpc_sync(next(worker), kNestedRemote, worker.info(next(worker, 2)), 1, 2);
    EXPECT_EQ(made.to_here(), 3);
    auto home = worker.rpc_sync(next(worker), kNestedRemote, worker.info(), 3, 4);
    EXPECT_TRUE(home.is_owner());
    EXPECT_EQ(home.local_value(), 7);
  });
}

// peer: rpc_test.py/rref return_local_rrefs: same
TEST(RpcConformance, ReturnLocalRrefs) {
  on_all(world(), [](Worker& worker) {
    const auto all = worker.rpc_sync(next(worker), kMakeLocals, 5);
    ASSERT_EQ(all.size(), 5u);
    for (std::int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(all[i].owner_name(), next(worker));
      EXPECT_EQ(all[i].to_here(), i);
    }
    EXPECT_EQ(worker.remote(next(worker), kMakeLocal, 9).to_here().to_here(), 9);
  });
}

// peer: rpc_test.py/rref pass_local_rrefs: same
TEST(RpcConformance, PassLocalRrefs) {
  on_all(world(), [](Worker& worker) {
    const std::vector<Number> mine{Number(worker, 1), Number(worker, 20), Number(worker, 300)};
    for (std::uint32_t to = 0; to < 3; ++to) {
      EXPECT_EQ(worker.rpc_sync(to, kSumOf, mine), 321);
      EXPECT_EQ(worker.rpc_async(to, kSumOf, mine).wait(), 321);
      EXPECT_EQ(worker.remote(to, kSumOf, mine).to_here(), 321);
    }
  });
}

// peer: rpc_test.py/rref rref_forward_chain: same
TEST(RpcConformance, RrefForwardChain) {
  on_all(world(), [](Worker& worker) {
    auto first = worker.remote(next(worker), kAdd, 20, 3);
    const auto copies = worker.rpc_sync(next(worker), kForwardChain, first, 8);
    ASSERT_EQ(copies.size(), 9u);
    for (const Number& copy : copies) {
      EXPECT_EQ(copy.to_here(), 23);
      EXPECT_EQ(copy.state()->value_id(), first.state()->value_id());
    }
    auto wrapped = worker.remote(next(worker, 2), kSame, first);
    EXPECT_EQ(wrapped.to_here().to_here(), 23);
    EXPECT_EQ(worker.remote(next(worker), kSame, Number(worker, 5)).to_here().local_value(), 5);
  });
}

// peer: jit/rpc_test.py/rref rref_as_arg_and_return: same
TEST(RpcConformance, RrefAsArgAndReturn) {
  on_all(world(), [](Worker& worker) {
    auto rref = worker.remote(next(worker), kAdd, 1, 2);
    for (std::uint32_t by = 1; by < 3; ++by) {
      auto back = worker.rpc_sync(next(worker, by), kSame, rref);
      EXPECT_EQ(back.state()->value_id(), rref.state()->value_id());
      EXPECT_EQ(back.owner(), rref.owner());
      EXPECT_EQ(back.to_here(), 3);
    }
  });
}

// peer: rpc_test.py/rref user_rrefs_confirmed: same
TEST(RpcConformance, UserRrefsConfirmed) {
  on_all(world(), [](Worker& worker) {
    auto rref = worker.remote(next(worker), kSlowSeven);
    EXPECT_FALSE(rref.confirmed_by_owner());
    EXPECT_TRUE(worker.rpc_sync(next(worker, 2), kIsConfirmed, rref));
    EXPECT_TRUE(worker.rpc_sync(next(worker), kIsConfirmed, rref));
  });
}

// peer: rpc_test.py/rref user_rrefs_confirmed_remote: same
TEST(RpcConformance, UserRrefsConfirmedRemote) {
  on_all(world(), [](Worker& worker) {
    auto rref = worker.remote(next(worker), kSlowSeven);
    EXPECT_TRUE(worker.remote(next(worker, 2), kIsConfirmed, rref).to_here());
  });
}

// peer: rpc_test.py/rref (documented) a value ends with its last reference: better: also when messages
//   overtake each other
TEST(RpcConformance, ValuesEndWithTheirLastReference) {
  for (std::uint64_t seed = 1; seed <= 10 && !::testing::Test::HasFailure(); ++seed) {
    Lives lives;
    ClusterOptions options = with_state(world(), lives);
    options.seed = seed;
    SimCluster cluster(options);
    cluster.run([&](Worker& worker) {
      for (std::uint32_t to = 0; to < 3; ++to) worker.rpc_sync(to, kAdd, 1, 2);
      worker.barrier();  // all workers are connected before messages may overtake each other
      if (worker.rank() != 0) return nap(worker, seconds(10));
      cluster.network().set_options({.jitter = milliseconds(2), .reorder = true});
      {
        auto tracked = worker.remote("worker1", kMakeTracked, 35);
        EXPECT_EQ(worker.rpc_sync("worker2", kReadTracked, tracked), 35);
        EXPECT_EQ(worker.rpc_sync("worker1", kReadTracked, tracked), 35);
        EXPECT_EQ(lives.made, 1);
        EXPECT_EQ(lives.alive, 1);
      }
      nap(worker, seconds(5));
      EXPECT_EQ(lives.alive, 0);
      cluster.network().set_options({});
    });
    if (::testing::Test::HasFailure()) ADD_FAILURE() << "seed " << seed;
  }
}

// peer: rpc_test.py/rref (C++ only) a value that cannot be sent: better: to_here() does not compile; its
//   member functions are called on the owner
TEST(RpcConformance, ToHereOfAValueThatCannotBeSent) {
  Lives lives;
  on_first(with_state(world(), lives), [](Worker& worker) {
    auto tracked = worker.remote("worker1", kMakeTracked, 35);
    static_assert(!wire::Transferable<Tracked>);  // so tracked.to_here() does not compile
    EXPECT_EQ(tracked.rpc_sync(kTrackedNumber), 35);
  });
}

/// One model, whose trainers' gradients are gathered in rounds; all trainers of a round share one future.
struct ParameterServer {
  ParameterServer(std::int64_t trainers, at::Tensor start, std::weak_ptr<ContinuationExecutor> continuations)
      : trainers(trainers),
        weight(std::move(start)),
        continuations(std::move(continuations)),
        round(this->continuations) {}
  const std::int64_t trainers;
  at::Tensor weight;
  std::weak_ptr<ContinuationExecutor> continuations;
  Promise<at::Tensor> round;
  at::Tensor gradient;
  std::int64_t arrived = 0;
};
using ServerPointer = std::shared_ptr<ParameterServer>;

ServerPointer make_server(Worker& worker, std::int64_t trainers, const at::Tensor& start) {
  return std::make_shared<ParameterServer>(trainers, start, worker.backend()->continuations());
}
Future<at::Tensor> update_and_fetch(const RRef<ServerPointer>& rref, const at::Tensor& gradient) {
  ParameterServer& server = *rref.local_value();
  auto result = server.round.future();
  server.gradient = server.arrived++ == 0 ? gradient : server.gradient + gradient;
  if (server.arrived < server.trainers) return result;
  server.weight = server.weight - 0.1 * server.gradient / static_cast<double>(server.trainers);
  server.arrived = 0;
  Promise<at::Tensor> done = std::exchange(server.round, Promise<at::Tensor>(server.continuations));
  done.set_value(server.weight);
  return result;
}
constexpr Function<make_server> kMakeServer{"make_server"};
constexpr Function<update_and_fetch> kUpdateAndFetch{"update_and_fetch"};

at::Tensor train(const RRef<ServerPointer>& server, at::Tensor weight, std::int64_t data) {
  for (int step = 0; step < 5; ++step) {
    weight = server.rpc_sync(kUpdateAndFetch, weight * static_cast<double>(data));
  }
  return weight;
}
constexpr Function<train> kTrain{"train"};

// peer: rpc_test.py/rref my_parameter_server: same
TEST(RpcConformance, MyParameterServer) {
  ClusterOptions options = world(4);
  options.functions.add(kMakeServer, kUpdateAndFetch, kTrain);
  options.threads = 1;
  on_first(options, [](Worker& worker) {
    const at::Tensor start = at::arange(1, 4, at::kDouble);
    auto server = worker.remote("worker1", kMakeServer, 3, start);
    std::vector<Future<at::Tensor>> trainers;
    for (std::int64_t i = 1; i <= 3; ++i) trainers.push_back(worker.rpc_async(i, kTrain, server, start, i));
    at::Tensor expected = start;
    for (int step = 0; step < 5; ++step) expected = expected - 0.1 * expected * 2.0;  // the mean of 1, 2, 3
    for (const auto& trainer : trainers) EXPECT_TRUE(at::allclose(trainer.wait(), expected));
  });
}

}  // namespace
}  // namespace torchspan::rpc_rref_arguments
