// Values that stay on the worker that made them: creating, fetching, calling methods on them, and the
// properties of an RRef.
#include <map>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_rrefs {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

using List = std::vector<std::int64_t>;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t slow_seven(Worker& worker) {
  nap(worker, milliseconds(300));
  return 7;
}
std::int64_t raise_func() { throw std::domain_error("Expected error"); }
std::int64_t sum_on_owner(const RRef<std::int64_t>& a, const RRef<std::int64_t>& b) {
  return a.local_value() + b.local_value();
}
std::int64_t append(const RRef<List>& list, std::int64_t value) {
  list.local_value().push_back(value);
  return static_cast<std::int64_t>(list.local_value().size());
}
/// How long each creation of a copy takes from now on, in milliseconds.
std::int64_t await_creation(Worker& worker, const RRef<std::int64_t>& copy) {
  const TimePoint begin = now(worker);
  copy.creation().wait();
  return std::chrono::duration_cast<milliseconds>(now(worker) - begin).count();
}
List make_list() { return {}; }
bool owns(const RRef<List>& list) { return list.is_owner(); }
double total(const RRef<at::Tensor>& x) { return x.local_value().sum().item<double>(); }
at::Tensor ones(std::int64_t size) { return at::ones({size}); }

class Parameters {
 public:
  explicit Parameters(const at::Tensor& start) : value_(start.clone()) {}
  at::Tensor value() const { return value_; }
  void update(const at::Tensor& by) { value_ += by; }
  std::int64_t updates_of_list(const List& values) {
    for (std::int64_t value : values) value_ += value;
    return static_cast<std::int64_t>(values.size());
  }

 private:
  at::Tensor value_;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<slow_seven> kSlowSeven{"slow_seven"};
constexpr Function<raise_func> kRaise{"raise_func"};
constexpr Function<sum_on_owner> kSumOnOwner{"sum_on_owner"};
constexpr Function<append> kAppend{"append"};
constexpr Function<await_creation> kAwaitCreation{"await_creation"};
constexpr Function<make_list> kMakeList{"make_list"};
constexpr Function<owns> kOwns{"owns"};
constexpr Function<total> kTotal{"total"};
constexpr Function<ones> kOnes{"ones"};
constexpr Class<Parameters, at::Tensor> kParameters{"Parameters"};
constexpr Function<&Parameters::value> kValue{"Parameters.value"};
constexpr Function<&Parameters::update> kUpdate{"Parameters.update"};
constexpr Function<&Parameters::updates_of_list> kUpdatesOfList{"Parameters.updates_of_list"};

ClusterOptions world(int workers = 2) {
  return world_of(
      workers, FunctionTable().add(kAdd, kSlowSeven, kRaise, kSumOnOwner, kAppend, kAwaitCreation, kMakeList,
                                   kOwns, kTotal, kOnes, kParameters, kValue, kUpdate, kUpdatesOfList));
}

// peer: rpc_test.py/rref owner_equality: same
TEST(RpcConformance, OwnerEquality) {
  on_first(world(3), [](Worker& worker) {
    auto first = worker.remote("worker1", kAdd, 1, 2);
    auto second = worker.remote("worker1", kAdd, 3, 4);
    auto third = worker.remote("worker2", kAdd, 5, 6);
    EXPECT_EQ(first.owner(), second.owner());
    EXPECT_NE(first.owner(), third.owner());
    EXPECT_EQ(first.owner(), worker.info("worker1"));
    std::unordered_map<WorkerInfo, int> by_owner;
    for (const auto* rref : {&first, &second, &third}) ++by_owner[rref->owner()];
    EXPECT_EQ(by_owner, (std::unordered_map<WorkerInfo, int>{{{"worker1", 1}, 2}, {{"worker2", 2}, 1}}));
  });
}

// peer: rpc_test.py/rref builtin_remote_ret: same
TEST(RpcConformance, BuiltinRemoteRet) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    auto sum = worker.remote(n % 4, "aten::add", {at::ones({n, n}), at::ones({n, n})});
    EXPECT_TRUE(at::equal(sum.to_here().toTensor(), at::full({n, n}, 2.0)));
  });
}

// peer: rpc_test.py/rref builtin_remote_self: same
TEST(RpcConformance, BuiltinRemoteSelf) {
  on_all(world(2), [](Worker& worker) {
    auto sum = worker.remote(worker.info(), "aten::add", {at::ones({2, 2}), at::ones({2, 2})});
    EXPECT_TRUE(sum.is_owner());
    EXPECT_TRUE(at::equal(sum.local_value().toTensor(), at::full({2, 2}, 2.0)));
    EXPECT_TRUE(at::equal(sum.to_here().toTensor(), at::full({2, 2}, 2.0)));
  });
}

// peer: rpc_test.py/rref multi_builtin_remote_ret: same
TEST(RpcConformance, MultiBuiltinRemoteRet) {
  on_all(world(4), [](Worker& worker) {
    std::vector<RRef<c10::IValue>> sums;
    for (std::int64_t i = 1; i <= 10; ++i) {
      sums.push_back(worker.remote((worker.rank() + i) % 4, "aten::add", {at::ones({i, i}), i}));
    }
    for (std::int64_t i = 1; i <= 10; ++i) {
      EXPECT_TRUE(at::equal(sums[i - 1].to_here().toTensor(), at::full({i, i}, 1.0 + i)));
    }
  });
}

// peer: rpc_test.py/rref py_udf_remote: same
TEST(RpcConformance, PyUdfRemote) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    auto sum = worker.remote(n % 4, kAdd, n, n + 1);
    EXPECT_EQ(sum.owner_name(), SimCluster::name(n % 4));
    EXPECT_EQ(sum.to_here(), 2 * n + 1);
  });
}

// peer: rpc_test.py/rref multi_py_udf_remote: same
TEST(RpcConformance, MultiPyUdfRemote) {
  on_all(world(4), [](Worker& worker) {
    std::vector<RRef<std::int64_t>> sums;
    for (std::int64_t i = 0; i < 20; ++i)
      sums.push_back(worker.remote((worker.rank() + i) % 4, kAdd, i, 2 * i));
    for (std::int64_t i = 0; i < 20; ++i) EXPECT_EQ(sums[i].to_here(), 3 * i);
  });
}

// peer: rpc_test.py/rref remote_same_worker: same
TEST(RpcConformance, RemoteSameWorker) {
  on_all(world(3), [](Worker& worker) {
    const std::uint32_t to = (worker.rank() + 1) % 3;
    auto a = worker.remote(to, kAdd, 1, 2);
    auto b = worker.remote(to, kAdd, 3, 4);
    EXPECT_EQ(worker.remote(to, kSumOnOwner, a, b).to_here(), 10);
    EXPECT_EQ(worker.rpc_sync(to, kSumOnOwner, a, a), 6);
  });
}

// peer: rpc_test.py/rref call_method_on_rref: same
TEST(RpcConformance, CallMethodOnRref) {
  on_all(world(3), [](Worker& worker) {
    auto parameters = worker.remote((worker.rank() + 1) % 3, kParameters, at::ones({2, 2}));
    parameters.rpc_sync(kUpdate, at::full({2, 2}, 10.0));
    parameters.rpc_async(kUpdate, at::full({2, 2}, 100.0)).wait();
    EXPECT_EQ(parameters.remote(kUpdate, at::full({2, 2}, 1000.0)).to_here(), Unit{});
    EXPECT_TRUE(at::equal(parameters.rpc_sync(kValue), at::full({2, 2}, 1111.0)));
  });
}

TEST(RpcConformance, CallsOnAReferenceNameTheirPlace) {
  on_first(world(), [](Worker& worker) {
    auto parameters = worker.remote("worker1", kParameters, at::ones({2, 2}));
    const at::Tensor wrong = at::ones({5});
    const auto expect_place = [](int line, const std::function<void()>& call) {
      EXPECT_THAT(error_of(call).what(), HasSubstr("[called at rpc_rrefs.cpp:" + std::to_string(line) + "]"));
    };
    expect_place(__LINE__, [&] { parameters.rpc_sync(kUpdate, wrong); });
    expect_place(__LINE__, [&] { parameters.rpc_async(kUpdate, wrong).wait(); });
    expect_place(__LINE__, [&] { worker.call_on(parameters, kUpdate, wrong).wait(); });
  });
}

// peer: rpc_test.py/rref rref_proxy_tensor: same
TEST(RpcConformance, RrefProxyTensor) {
  on_first(world(), [](Worker& worker) {
    auto x = worker.remote("worker1", kOnes, 6);
    EXPECT_EQ(x.rpc_sync(kTotal), 6.0);
    EXPECT_EQ(x.rpc_async(kTotal).wait(), 6.0);
    EXPECT_EQ(x.remote(kTotal).to_here(), 6.0);
    RRef<at::Tensor> mine(worker, at::full({3}, 2.0));
    EXPECT_EQ(mine.rpc_sync(kTotal), 6.0);
  });
}

// peer: rpc_test.py/rref rref_proxy_class: same
TEST(RpcConformance, RrefProxyClass) {
  on_first(world(), [](Worker& worker) {
    for (const std::string owner : {"worker0", "worker1"}) {
      auto parameters = worker.remote(owner, kParameters, at::zeros({3}));
      EXPECT_EQ(parameters.rpc_sync(kUpdatesOfList, List{1, 2, 3}), 3);
      EXPECT_TRUE(at::equal(parameters.remote(kValue).to_here(), at::full({3}, 6.0)));
    }
  });
}

// peer: rpc_test.py/rref rref_proxy_reuse: same
TEST(RpcConformance, RrefProxyReuse) {
  on_first(world(), [](Worker& worker) {
    auto parameters = worker.remote("worker1", kParameters, at::zeros({3}));
    const Caller caller = worker.with({.timeout = seconds(5)});
    for (int i = 0; i < 10; ++i) caller.call_on(parameters, kUpdate, at::ones({3})).wait();
    EXPECT_TRUE(at::equal(caller.call_on(parameters, kValue).wait(), at::full({3}, 10.0)));
  });
}

// peer: jit/rpc_test.py/rref rref_is_owner: same
TEST(RpcConformance, RrefIsOwner) {
  on_first(world(), [](Worker& worker) {
    auto there = worker.remote("worker1", kMakeList);
    const RRef<List> here(worker, List{1});
    EXPECT_FALSE(there.is_owner());
    EXPECT_TRUE(here.is_owner());
    EXPECT_TRUE(there.rpc_sync(kOwns));
    EXPECT_FALSE(worker.rpc_sync("worker1", kOwns, here));
    EXPECT_EQ(here.owner(), worker.info());
  });
}

// peer: jit/rpc_test.py/rref rref_local_value: same
TEST(RpcConformance, RrefLocalValue) {
  on_first(world(), [](Worker& worker) {
    auto mine = worker.remote("worker0", kSlowSeven);
    EXPECT_EQ(mine.local_value(), 7) << "waits for its creation";
    EXPECT_EQ(&mine.local_value(), &mine.local_value()) << "the value itself";
    EXPECT_EQ(RRef<std::int64_t>(worker, 5).local_value(), 5);
  });
}

// peer: jit/rpc_test.py/rref rref_list_mutate: same
TEST(RpcConformance, RrefListMutate) {
  on_first(world(), [](Worker& worker) {
    auto list = worker.remote("worker1", kMakeList);
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(list.rpc_sync(kAppend, i), i + 1);
    EXPECT_EQ(list.to_here(), (List{0, 1, 2, 3, 4}));
  });
}

// peer: rpc_test.py/rref local_value_not_on_owner: same
TEST(RpcConformance, LocalValueNotOnOwner) {
  on_first(world(), [](Worker& worker) {
    auto there = worker.remote("worker1", kAdd, 1, 2);
    const Error error = error_of([&] { there.local_value(); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'worker0'"), HasSubstr("'worker1'"), HasSubstr("to_here()")));
    EXPECT_EQ(there.to_here(), 3);
  });
}

// peer: rpc_test.py/rref local_rref_no_fork: same
TEST(RpcConformance, LocalRrefNoFork) {
  ClusterOptions options = world();
  SimCluster cluster(options);
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    int messages = 0;
    cluster.network().observe([&](const net::SimMessage& message) {
      if (message.from == "sim:worker0" || message.to == "sim:worker0") ++messages;
    });
    {
      RRef<std::int64_t> mine(worker, 35);
      EXPECT_EQ(mine.to_here(), 35);
      EXPECT_EQ(mine.local_value(), 35);
      const RRef<std::int64_t> same = mine;  // NOLINT(performance-unnecessary-copy-initialization)
      EXPECT_EQ(same.to_here(), 35);
    }
    nap(worker, seconds(1));
    EXPECT_EQ(messages, 0);
    worker.rpc_sync("worker1", kAdd, 1, 2);
    EXPECT_GT(messages, 0) << "the observer sees calls";
    cluster.network().observe({});
  });
}

// peer: rpc_test.py/rref rref_str: same
TEST(RpcConformance, RrefStr) {
  on_first(world(), [](Worker& worker) {
    auto there = worker.remote("worker1", kAdd, 1, 2);
    const GlobalId value = there.state()->value_id();
    const GlobalId fork = there.state()->fork_id();
    auto text = [](const GlobalId& id) { return std::to_string(id.worker) + ":" + std::to_string(id.local); };
    EXPECT_THAT(there.str(), AllOf(HasSubstr("value " + text(value)), HasSubstr("fork " + text(fork)),
                                   HasSubstr("'worker1'")));
    const RRef<std::int64_t> here(worker, 1);
    EXPECT_THAT(here.str(), AllOf(HasSubstr("value " + text(here.state()->value_id())),
                                  HasSubstr("'worker0'"), Not(HasSubstr("fork"))));
  });
}

// peer: rpc_test.py/rref rref_get_future: same
TEST(RpcConformance, RrefGetFuture) {
  on_first(world(), [](Worker& worker) {
    auto of_function = worker.remote("worker1", kSlowSeven);
    EXPECT_FALSE(of_function.creation().done());
    of_function.creation().wait();
    EXPECT_TRUE(of_function.confirmed_by_owner());
    worker.remote("worker1", kParameters, at::ones({1})).creation().wait();
    worker.remote("worker1", "aten::add", {1, 2}).creation().wait();
    auto failed = worker.remote("worker1", kRaise);
    expect_error(ErrorKind::kRemoteFailure, "Expected error", [&] { failed.creation().wait(); });
    EXPECT_FALSE(failed.confirmed_by_owner());
    bool called = false;
    worker.remote("worker0", kSlowSeven).creation().then([&](Future<void>) { called = true; }).wait();
    EXPECT_TRUE(called);
  });
}

TEST(RpcConformance, CreationOfACopyIsThatOfTheValue) {
  on_first(world(3), [](Worker& worker) {
    for (const char* user : {"worker0", "worker2"}) {
      EXPECT_GT(worker.rpc_sync(user, kAwaitCreation, worker.remote("worker1", kSlowSeven)), 200) << user;
      expect_error(ErrorKind::kRemoteFailure, "Expected error",
                   [&] { worker.rpc_sync(user, kAwaitCreation, worker.remote("worker1", kRaise)); });
      const auto there = worker.remote("worker1", kSlowSeven);
      there.creation().wait();
      EXPECT_LT(worker.rpc_sync(user, kAwaitCreation, there), 10) << user;
    }
  });
}

// peer: rpc_test.py pg_init_no_rpc_init: better: an RRef cannot be created without a worker; using an empty
//   one throws an error that says so
TEST(RpcConformance, PgInitNoRpcInit) {
  static_assert(!std::is_constructible_v<RRef<std::int64_t>, std::int64_t>, "an RRef needs its worker");
  const RRef<std::int64_t> none;
  EXPECT_FALSE(none.valid());
  expect_error(ErrorKind::kInvalid, "this RRef is empty", [&] { none.to_here(); });
  expect_error(ErrorKind::kInvalid, "this RRef is empty", [&] { none.owner_name(); });
}

// peer: rpc_test.py/rref (documented) remote, then to_here: better: one round trip: the fetch does not wait
//   for the confirmation
TEST(RpcConformance, RemoteIsUsedInOneRoundTrip) {
  SimCluster cluster(world());
  cluster.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    worker.rpc_sync("worker1", kAdd, 1, 1);
    const TimePoint begin = now(worker);
    EXPECT_EQ(worker.remote("worker1", kAdd, 1, 2).to_here(), 3);
    EXPECT_LE(now(worker) - begin, std::chrono::microseconds(40)) << "two legs of 20 us";
  });
}

}  // namespace
}  // namespace torchspan::rpc_rrefs
