// The workers of a world, how to address them, and every kind of function that can be called.
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_calls {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
at::Tensor add_tensors(const at::Tensor& a, const at::Tensor& b) { return a + b; }
std::string get_name(Worker& worker) { return worker.name(); }
WorkerInfo same_info(const WorkerInfo& info) { return info; }
std::int64_t largest(const std::vector<std::int64_t>& values) {
  return *std::max_element(values.begin(), values.end());
}
std::int64_t my_function(std::int64_t a, std::int64_t b, std::int64_t c) { return a + b + c; }
void count_up(Worker& worker) { ++state_of<int>(worker); }
at::Tensor heavy(Worker& worker, const at::Tensor& x) {
  nap(worker, milliseconds(100));
  return x.mm(x);
}
std::string ask_back(Worker& worker, const WorkerInfo& caller);

struct Adder {
  Adder(std::int64_t first, std::int64_t second) : sum(first + second) {}
  std::int64_t plus(std::int64_t by) const { return sum + by; }
  void grow(std::int64_t by) { sum += by; }
  static std::int64_t difference(std::int64_t a, std::int64_t b) { return a - b; }
  static Adder twice(std::int64_t value) { return Adder(value, value); }
  std::int64_t sum;
};

constexpr Function<add> kAdd{"add"};
constexpr Function<add_tensors> kAddTensors{"add_tensors"};
constexpr Function<get_name> kWorkerName{"get_name"};
constexpr Function<same_info> kSameInfo{"same_info"};
constexpr Function<largest> kLargest{"largest"};
constexpr Function<my_function> kMyFunction{"my_function"};
constexpr Function<count_up> kCountUp{"count_up"};
constexpr Function<heavy> kHeavy{"heavy"};
constexpr Function<ask_back> kAskBack{"ask_back"};
constexpr Class<Adder, std::int64_t, std::int64_t> kAdder{"Adder"};
constexpr Function<&Adder::plus> kPlus{"Adder.plus"};
constexpr Function<&Adder::grow> kGrow{"Adder.grow"};
constexpr Function<&Adder::difference> kDifference{"Adder.difference"};
constexpr Function<&Adder::twice> kTwice{"Adder.twice"};

constexpr auto twice_of = [](std::int64_t x) { return 2 * x; };
constexpr auto greet = [](Worker& worker, const std::string& greeting) { return greeting + worker.name(); };
constexpr Function<twice_of> kTwiceOf{"twice_of"};
constexpr Function<greet> kGreet{"greet"};

std::string ask_back(Worker& worker, const WorkerInfo& caller) {
  return worker.rpc_sync(caller, kWorkerName) + " called " + worker.name();
}

ClusterOptions world(int workers) {
  return world_of(workers, FunctionTable().add(kAdd, kAddTensors, kWorkerName, kSameInfo, kLargest,
                                               kMyFunction, kCountUp, kHeavy, kAskBack, kAdder, kPlus, kGrow,
                                               kDifference, kTwice, kTwiceOf, kGreet));
}

/// Asks which rank the callee sees as the caller.
struct CallerQuery {
  static constexpr auto kType = wire::MessageType{0x8001};
  static constexpr std::string_view kName = "who_am_i";
  using Reply = std::uint32_t;
  std::int64_t unused = 0;
};

}  // namespace

}  // namespace torchspan::rpc_calls

namespace torchspan {

template <>
struct Wire<rpc_calls::CallerQuery>
    : WireStruct<rpc_calls::CallerQuery, "CallerQuery", &rpc_calls::CallerQuery::unused> {};

}  // namespace torchspan

namespace torchspan::rpc_calls {
namespace {

class CallerExtension final : public rpc::Extension {
 public:
  void attach(rpc::Registrar& registrar) override {
    registrar.handle<CallerQuery>(rpc::RunOn::kPool,
                                  [](const rpc::CallInfo& call, CallerQuery) { return call.peer; });
  }
};

// peer: rpc_test.py worker_id: same
TEST(RpcConformance, WorkerId) {
  on_first(world(3), [](Worker& worker) {
    EXPECT_EQ(worker.info(), (WorkerInfo{"worker0", 0}));
    EXPECT_EQ(worker.info("worker1").rank, 1u);
    EXPECT_EQ(worker.info(2).name, "worker2");
    const Error error = error_of([&] { worker.info("worker9"); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'worker9'"), HasSubstr("'worker1' (1)")));
  });
}

// peer: rpc_test.py get_worker_infos: same
TEST(RpcConformance, GetWorkerInfos) {
  on_all(world(4), [](Worker& worker) {
    ASSERT_EQ(worker.world_size(), 4u);
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(worker.workers().at(rank), (WorkerInfo{SimCluster::name(rank), rank}));
    }
  });
}

// peer: rpc_test.py worker_info_pickle: same
TEST(RpcConformance, WorkerInfoPickle) {
  on_first(world(2), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kSameInfo, worker.info("worker1")), (WorkerInfo{"worker1", 1}));
    EXPECT_EQ(worker.rpc_sync("worker1", kSameInfo, worker.info()), worker.info());
  });
}

// peer: rpc_test.py expected_src: same
TEST(RpcConformance, ExpectedSrc) {
  ClusterOptions options = world(3);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<CallerExtension>());
    return extensions;
  };
  on_all(options, [](Worker& worker) {
    for (std::uint32_t to = 0; to < 3; ++to) {
      EXPECT_EQ(worker.request(to, CallerQuery{}).wait(), worker.rank());
    }
  });
}

// peer: rpc_test.py send_to_rank: same
TEST(RpcConformance, SendToRank) {
  static_assert(!std::is_constructible_v<Destination, double>, "a fraction is no rank");
  on_all(world(3), [](Worker& worker) {
    const std::uint32_t next = (worker.rank() + 1) % 3;
    EXPECT_EQ(worker.rpc_sync(next, kWorkerName), SimCluster::name(next));
    EXPECT_EQ(worker.rpc_async(next, kWorkerName).wait(), SimCluster::name(next));
    EXPECT_EQ(worker.remote(next, kWorkerName).to_here(), SimCluster::name(next));
    for (const int none : {-1, 3}) {
      const std::string text = "there is no rank " + std::to_string(none);
      expect_error(ErrorKind::kInvalid, text, [&] { worker.rpc_sync(none, kWorkerName); });
      expect_error(ErrorKind::kInvalid, text, [&] { worker.rpc_async(none, kWorkerName).wait(); });
      expect_error(ErrorKind::kInvalid, text, [&] { worker.remote(none, kWorkerName).to_here(); });
    }
  });
}

// peer: rpc_test.py self_add: same
TEST(RpcConformance, SelfAdd) {
  on_all(world(2), [](Worker& worker) {
    const at::Tensor x = at::ones({2, 2});
    auto later = worker.rpc_async(worker.info(), "aten::add", {x, 1});
    EXPECT_TRUE(at::equal(worker.rpc_sync(worker.info(), "aten::add", {x, x}).toTensor(), x + x));
    EXPECT_TRUE(at::equal(later.wait().toTensor(), x + 1));
    const at::Tensor copy = worker.rpc_sync(worker.rank(), kAddTensors, x, at::zeros({2, 2}));
    EXPECT_NE(copy.data_ptr(), x.data_ptr());
  });
}

// peer: rpc_test.py add: same
TEST(RpcConformance, Add) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    const at::Tensor x = at::ones({n, n});
    const auto sum = worker.rpc_sync(SimCluster::name(n % 4), "aten::add", {x, x});
    EXPECT_TRUE(at::equal(sum.toTensor(), at::full({n, n}, 2.0)));
  });
}

// peer: rpc_test.py add_with_id: same
TEST(RpcConformance, AddWithId) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    const at::Tensor x = at::ones({n, n});
    const auto sum = worker.rpc_sync(worker.info(n % 4), "aten::add", {x, x * 2});
    EXPECT_TRUE(at::equal(sum.toTensor(), at::full({n, n}, 3.0)));
  });
}

// peer: rpc_test.py scalar_add: same
TEST(RpcConformance, ScalarAdd) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    const auto sum = worker.rpc_sync(n % 4, "aten::add", {at::ones({n, n}), n});
    EXPECT_TRUE(at::equal(sum.toTensor(), at::ones({n, n}) + n));
  });
}

// peer: rpc_test.py async_add: same
TEST(RpcConformance, AsyncAdd) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    auto sum = worker.rpc_async(n % 4, "aten::add", {at::ones({n, n}), at::ones({n, n})});
    EXPECT_TRUE(at::equal(sum.wait().toTensor(), at::full({n, n}, 2.0)));
  });
}

// peer: rpc_test.py nonzero: same
TEST(RpcConformance, Nonzero) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    at::Tensor x = at::ones({n, n});
    x[n - 1][n - 1] = 0;
    const auto places = worker.rpc_sync(n % 4, "aten::nonzero", {x});
    EXPECT_EQ(places.toTensor().size(0), n * n - 1);
    EXPECT_TRUE(at::equal(places.toTensor(), x.nonzero()));
  });
}

// peer: rpc_test.py multi_rpc: same
TEST(RpcConformance, MultiRpc) {
  on_all(world(4), [](Worker& worker) {
    for (std::int64_t i = 0; i < 20; ++i) {
      const std::int64_t n = i + worker.rank() + 1;
      const at::Tensor x = at::ones({n, n});
      const auto sum = worker.rpc_sync((worker.rank() + 1) % 4, "aten::add", {x, x});
      EXPECT_TRUE(at::equal(sum.toTensor(), at::full({n, n}, 2.0)));
    }
  });
}

TEST(RpcConformance, LambdasWithoutCapturesAreFunctions) {
  on_first(world(2), [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker1", kTwiceOf, 21), 42);
    EXPECT_EQ(worker.rpc_sync("worker1", kGreet, "hello "), "hello worker1");
    EXPECT_EQ(worker.remote("worker1", kTwiceOf, 4).to_here(), 8);
  });
}

// peer: rpc_test.py int_callee: same
TEST(RpcConformance, IntCallee) {
  on_all(world(2), [](Worker& worker) {
    const std::int64_t wide = 1 - worker.rank();
    const std::uint8_t narrow = static_cast<std::uint8_t>(wide);
    EXPECT_EQ(worker.rpc_sync(wide, kAdd, 1, 2), 3);
    EXPECT_EQ(worker.rpc_sync(narrow, kWorkerName), SimCluster::name(static_cast<int>(wide)));
  });
}

// peer: rpc_test.py py_built_in: same
TEST(RpcConformance, PyBuiltIn) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    EXPECT_EQ(worker.rpc_sync(n % 4, kLargest, std::vector<std::int64_t>{n, n + 1, n - 7}), n + 1);
  });
}

// peer: rpc_test.py py_user_defined: same
TEST(RpcConformance, PyUserDefined) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    EXPECT_EQ(worker.rpc_sync(n % 4, kMyFunction, n, n + 1, n + 2), 3 * n + 3);
  });
}

// peer: rpc_test.py py_no_return_result: same
TEST(RpcConformance, PyNoReturnResult) {
  int count = 0;
  on_first(with_state(world(2), count), [&](Worker& worker) {
    count = 0;
    static_assert(std::is_void_v<decltype(worker.rpc_sync("worker1", kCountUp))>);
    worker.rpc_sync("worker1", kCountUp);
    worker.rpc_async("worker1", kCountUp).wait();
    EXPECT_EQ(worker.remote("worker1", kCountUp).to_here(), Unit{});
    EXPECT_EQ(count, 3);
  });
}

// peer: rpc_test.py py_class_constructor: same
TEST(RpcConformance, PyClassConstructor) {
  on_first(world(2), [](Worker& worker) {
    auto adder = worker.remote("worker1", kAdder, 3, 4);
    EXPECT_EQ(adder.owner_name(), "worker1");
    EXPECT_EQ(adder.rpc_sync(kPlus, 0), 7);
  });
}

// peer: rpc_test.py py_class_instance_method: same
TEST(RpcConformance, PyClassInstanceMethod) {
  on_first(world(2), [](Worker& worker) {
    auto adder = worker.remote("worker1", kAdder, 2, 2);
    EXPECT_EQ(adder.rpc_sync(kPlus, 10), 14);
    adder.rpc_sync(kGrow, 6);
    EXPECT_EQ(adder.rpc_async(kPlus, 0).wait(), 10);
    EXPECT_EQ(adder.remote(kPlus, 1).to_here(), 11);
  });
}

// peer: rpc_test.py py_class_method: same
TEST(RpcConformance, PyClassMethod) {
  on_first(world(2),
           [](Worker& worker) { EXPECT_EQ(worker.remote("worker1", kTwice, 21).rpc_sync(kPlus, 0), 42); });
}

// peer: rpc_test.py py_class_static_method: same
TEST(RpcConformance, PyClassStaticMethod) {
  on_first(world(2), [](Worker& worker) { EXPECT_EQ(worker.rpc_sync("worker1", kDifference, 5, 8), -3); });
}

// peer: rpc_test.py py_multi_async_call: same
TEST(RpcConformance, PyMultiAsyncCall) {
  on_all(world(4), [](Worker& worker) {
    const std::uint32_t to = (worker.rank() + 1) % 4;
    auto adder = worker.remote(to, kAdder, 1, 1);
    auto of_function = worker.rpc_async(to, kAdd, 1, 2);
    auto of_static = worker.rpc_async(to, kDifference, 1, 2);
    auto of_member = adder.rpc_async(kPlus, 5);
    auto of_operator = worker.rpc_async(to, "aten::add", {at::ones({2}), 1});
    EXPECT_EQ(of_function.wait(), 3);
    EXPECT_EQ(of_static.wait(), -1);
    EXPECT_EQ(of_member.wait(), 7);
    EXPECT_TRUE(at::equal(of_operator.wait().toTensor(), at::full({2}, 2.0)));
  });
}

// peer: rpc_test.py nested_rpc: better: works with one handler thread per worker, where the peer's gets no
//   reply
TEST(RpcConformance, NestedRpc) {
  ClusterOptions options = world(3);
  options.threads = 1;
  on_all(options, [](Worker& worker) {
    const std::string peer = SimCluster::name((worker.rank() + 1) % 3);
    EXPECT_EQ(worker.rpc_sync(peer, kAskBack, worker.info()), worker.name() + " called " + peer);
  });
}

// peer: rpc_test.py stress_light_rpc: same
TEST(RpcConformance, StressLightRpc) {
  ClusterOptions options = world(3);
  options.network.jitter = milliseconds(1);
  on_first(options, [](Worker& worker) {
    std::vector<Future<std::int64_t>> sums;
    for (std::int64_t i = 0; i < 1000; ++i) sums.push_back(worker.rpc_async(1 + i % 2, kAdd, i, -7));
    for (std::int64_t i = 0; i < 1000; ++i) ASSERT_EQ(sums[i].wait(), i - 7);
  });
}

// peer: rpc_test.py stress_heavy_rpc: same
TEST(RpcConformance, StressHeavyRpc) {
  on_first(world(2), [](Worker& worker) {
    std::vector<Future<at::Tensor>> products;
    for (int i = 0; i < 20; ++i)
      products.push_back(worker.rpc_async("worker1", kHeavy, at::full({50, 50}, i)));
    for (int i = 0; i < 20; ++i) {
      EXPECT_TRUE(at::equal(products[i].wait(), at::full({50, 50}, 50 * i * i))) << i;
    }
  });
}

}  // namespace
}  // namespace torchspan::rpc_calls
