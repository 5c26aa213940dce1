// Failures in user code, in the table of functions, and on the way.
#include <ATen/ATen.h>

#include "tests/parity/rpc_faults.h"
#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_errors {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Opaque {};  // cannot be sent

std::int64_t add(std::int64_t a, std::int64_t b) { return a + b; }
std::int64_t raise_func() { throw std::domain_error("Expected error"); }
void raise_func_escape() { throw std::invalid_argument("Expected\nerror with \"quotes\" and \\n"); }
void throw_number() { throw 42; }
std::int64_t element(const std::vector<std::int64_t>& values, std::uint64_t index) {
  return values.at(index);
}
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a.mm(b); }
Opaque make_opaque() { return {}; }
void wait_and_add(Worker& worker) { nap(worker, seconds(2)); }
std::int64_t raise_on_next(Worker& worker);

constexpr Function<add> kAdd{"add"};
constexpr Function<raise_func> kRaise{"raise_func"};
constexpr Function<raise_func_escape> kRaiseEscape{"raise_func_escape"};
constexpr Function<throw_number> kThrowNumber{"throw_number"};
constexpr Function<element> kElement{"element"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<make_opaque> kMakeOpaque{"make_opaque"};
constexpr Function<wait_and_add> kSlow{"wait_and_add"};
constexpr Function<raise_on_next> kRaiseOnNext{"raise_on_next"};
constexpr Function<add> kOnlyOnTheCaller{"only_on_the_caller"};

std::int64_t raise_on_next(Worker& worker) {
  const int next = worker.rank() + 1;
  return next + 1 < worker.world_size() ? worker.rpc_sync(next, kRaiseOnNext) : worker.rpc_sync(next, kRaise);
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

FunctionTable functions() {
  return FunctionTable().add(kAdd, kRaise, kRaiseEscape, kThrowNumber, kElement, kMultiply, kMakeOpaque,
                             kSlow, kRaiseOnNext);
}

void expect_expected_error(const Error& error, const std::string& thrower) {
  EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure) << error.what();
  ASSERT_EQ(error.frames().size(), 1u) << error.what();
  EXPECT_EQ(error.frames()[0].type, "std::domain_error");
  EXPECT_EQ(error.frames()[0].text, "Expected error");
  EXPECT_EQ(error.frames()[0].call, "raise_func");
  EXPECT_EQ(error.frames()[0].worker, thrower);
}

// peer: rpc_test.py py_raise_in_user_func: differs: type, text, worker and call are sent in frames; the
//   callee does not log an error that it reports to its caller
TEST(RpcConformance, PyRaiseInUserFunc) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    for (const std::string to : {"worker1", "worker0"}) {
      expect_expected_error(error_of([&] { worker.rpc_sync(to, kRaise); }), to);
      expect_expected_error(error_of([&] { worker.rpc_async(to, kRaise).wait(); }), to);
    }
  });
}

// peer: rpc_test.py py_raise_in_user_func_escaped_str: better: the text arrives as it was thrown
TEST(RpcConformance, PyRaiseInUserFuncEscapedStr) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_async("worker1", kRaiseEscape).wait(); });
    EXPECT_EQ(error.frames().at(0).text, "Expected\nerror with \"quotes\" and \\n");
    EXPECT_THAT(error.what(), HasSubstr("Expected\nerror with \"quotes\" and \\n"));
    EXPECT_THAT(error.what(), HasSubstr("std::invalid_argument"));
  });
}

TEST(RpcErrors, TheTextOfAnExceptionIsNotRepeatedForEachHop) {
  std::vector<int> counts;
  for (const int workers : {2, 3, 5}) {
    on_first(world_of(workers, functions()), [&](Worker& worker) {
      const Error error = error_of([&] {
        if (workers == 2) worker.rpc_sync("worker1", kRaise);
        worker.rpc_sync("worker1", kRaiseOnNext);
      });
      EXPECT_EQ(error.frames().size(), static_cast<std::size_t>(workers - 1)) << error.what();
      EXPECT_THAT(error.message(), HasSubstr("std::domain_error: Expected error"));
      EXPECT_THAT(error.message(), HasSubstr(workers == 2 ? "'raise_func' threw" : "'raise_on_next' threw"));
      EXPECT_THAT(error.what(), HasSubstr("on worker 'worker" + std::to_string(workers - 1) + "'"));
      counts.push_back(count_of(error.what(), "Expected error"));
    });
  }
  for (const int count : counts) EXPECT_EQ(count, counts.front());
}

// peer: rpc_test.py (documented) an error in a nested call: better: every hop is a frame of the error
TEST(RpcConformance, PyRaiseNestedUserFuncNamesEveryHop) {
  on_first(world_of(3, functions()), [](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_sync("worker1", kRaiseOnNext); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    ASSERT_EQ(error.frames().size(), 2u) << error.what();
    EXPECT_EQ(error.frames()[0].worker, "worker2");
    EXPECT_EQ(error.frames()[0].type, "std::domain_error");
    EXPECT_EQ(error.frames()[1].worker, "worker1");
    EXPECT_EQ(error.frames()[1].call, "raise_on_next");
  });
}

// peer: rpc_test.py (C++ only) a thrown number: better
TEST(RpcConformance, RaiseANonException) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    expect_error(ErrorKind::kRemoteFailure, "throw_number",
                 [&] { worker.rpc_sync("worker1", kThrowNumber); });
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3);
  });
}

// Arguments of a wrong type or number do not compile; for wrong values the function throws.
// peer: rpc_test.py py_function_exception: better: wrong arguments do not compile; wrong values are the
//   function's own error
TEST(RpcConformance, PyFunctionException) {
  static_assert(!std::is_constructible_v<rpc::SignatureOf<add>::Arguments, int>);
  static_assert(!std::is_constructible_v<rpc::SignatureOf<add>::Arguments, int, int, int>);
  static_assert(!std::is_constructible_v<rpc::SignatureOf<add>::Arguments, std::string, int>);
  on_first(world_of(2, functions()), [](Worker& worker) {
    const std::vector<std::int64_t> values{4, 5, 6};
    EXPECT_EQ(worker.rpc_sync("worker1", kElement, values, 2), 6);
    const Error error = error_of([&] { worker.rpc_sync("worker1", kElement, values, 3); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    EXPECT_EQ(error.frames().at(0).type, "std::out_of_range");
    EXPECT_EQ(error.call(), "element");
    const Error shapes =
        error_of([&] { worker.rpc_sync("worker1", kMultiply, at::ones({2}), at::ones({3})); });
    EXPECT_EQ(shapes.kind(), ErrorKind::kRemoteFailure);
    EXPECT_EQ(shapes.frames().at(0).type, "c10::Error");
  });
}

// peer: rpc_test.py function_not_on_callee: same
TEST(RpcConformance, FunctionNotOnCallee) {
  ClusterOptions options = world_of(2, functions());
  options.adjust = [](int rank, WorkerPlan& plan) {
    if (rank == 0) plan.functions.add(kOnlyOnTheCaller);
  };
  on_first(options, [](Worker& worker) {
    EXPECT_EQ(worker.rpc_sync("worker0", kOnlyOnTheCaller, 1, 2), 3);
    const Error error = error_of([&] { worker.rpc_sync("worker1", kOnlyOnTheCaller, 1, 2); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
    EXPECT_THAT(
        error.what(),
        AllOf(HasSubstr("worker 'worker1' does not have this function, which worker 'worker0' called"),
              HasSubstr("only_on_the_caller")));
    expect_error(ErrorKind::kInvalid, "worker1",
                 [&] { worker.remote("worker1", kOnlyOnTheCaller, 1, 2).to_here(); });
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3) << "the callee survives";
  });
}

// peer: rpc_test.py op_with_invalid_args: same: found on the callee; the error lists the schemas
TEST(RpcConformance, OpWithInvalidArgs) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_sync("worker1", "aten::add", {"text", at::ones({1})}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no overload of 'aten::add' takes (String, Tensor)"),
                                    HasSubstr("aten::add.Tensor(Tensor self")));
    expect_error(ErrorKind::kInvalid, "there is no operator 'aten::no_such_operator'",
                 [&] { worker.rpc_sync("worker1", "aten::no_such_operator", {1}); });
    expect_error(ErrorKind::kInvalid, "namespace, like aten::add", [&] {
      worker.rpc_sync("worker1", "add", {1, 2});
    });
    EXPECT_EQ(worker.rpc_sync("worker1", "aten::add", {1, 2}).toInt(), 3);
  });
}

// peer: rpc_test.py (documented) a result that cannot be sent: better: rpc_sync() does not compile, remote()
//   leaves the result on its owner
TEST(RpcConformance, ResultThatCannotBeSentStaysThere) {
  static_assert(!wire::Transferable<Opaque>);  // so rpc_sync(…, kMakeOpaque) does not compile
  on_first(world_of(2, functions()), [](Worker& worker) {
    auto opaque = worker.remote("worker1", kMakeOpaque);
    opaque.creation().wait();
    EXPECT_EQ(opaque.owner_name(), "worker1");
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3);
  });
}

// peer: rpc_test.py handle_send_exceptions: better: fails within a second and names the worker
TEST(RpcConformance, HandleSendExceptions) {
  ClusterOptions options = world_of(3, functions());
  options.graceful = false;
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    options.seed = seed;
    SimCluster world(options);
    world.run([&](Worker& worker) {
      if (worker.rank() != 0) return nap(worker, seconds(10));
      EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3);
      auto pending = worker.rpc_async("worker1", kSlow);
      nap(worker, milliseconds(10));
      world.kill(1);
      const TimePoint died = now(worker);
      const Error first = error_of([&] { pending.wait(); });
      EXPECT_EQ(first.kind(), ErrorKind::kDisconnected) << first.what();
      EXPECT_EQ(first.worker(), "worker1");
      const Error later = error_of([&] { worker.rpc_sync("worker1", kAdd, 1, 2); });
      EXPECT_EQ(later.kind(), ErrorKind::kDisconnected) << later.what();
      EXPECT_EQ(later.worker(), "worker1");
      EXPECT_LT(now(worker) - died, seconds(1));
      EXPECT_EQ(worker.rpc_sync("worker2", kAdd, 1, 2), 3);
    });
  }
}

// peer: rpc_test.py future_wait_twice: same
TEST(RpcConformance, FutureWaitTwice) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    std::vector<Future<std::int64_t>> futures;
    for (int i = 0; i < 20; ++i) futures.push_back(worker.rpc_async("worker1", kRaise));
    for (const auto& future : futures) {
      expect_expected_error(error_of([&] { future.wait(); }), "worker1");
      expect_expected_error(error_of([&] { future.wait(); }), "worker1");
      EXPECT_TRUE(future.error());
    }
  });
}

// peer: rpc_test.py remote_with_exception: same
TEST(RpcConformance, RemoteWithException) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    auto rref = worker.remote("worker1", kRaise);
    for (int i = 0; i < 2; ++i) expect_expected_error(error_of([&] { rref.to_here(); }), "worker1");
    expect_expected_error(error_of([&] { rref.creation().wait(); }), "worker1");
    auto mine = worker.remote("worker0", kRaise);
    expect_expected_error(error_of([&] { mine.to_here(); }), "worker0");
    expect_expected_error(error_of([&] { mine.local_value(); }), "worker0");
  });
}

// peer: rpc_test.py remote_throw: same
TEST(RpcConformance, RemoteThrow) {
  on_first(world_of(2, functions()), [](Worker& worker) {
    auto rref = worker.remote("worker1", "aten::mm", {at::ones({2}), at::ones({3})});
    const Error error = error_of([&] { rref.to_here(); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    EXPECT_EQ(error.frames().at(0).worker, "worker1");
    EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3);
  });
}

/// For the request, and for its reply.
TEST(RpcErrors, ACallWithoutMemoryForAMessageFailsAlone) {
  on_first_in(world_of(2, functions()), [](Worker& worker, SimCluster& world) {
    for (const std::string from : {"worker0", "worker1"}) {
      EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 1, 2), 3);
      run_out_of_memory(world, from);
      const Error error = error_of([&] { worker.rpc_sync("worker1", kAdd, 3, 4); });
      EXPECT_THAT(error.what(), AllOf(HasSubstr("bad_alloc"), HasSubstr("'add'"), HasSubstr("'worker1'")));
      EXPECT_EQ(worker.rpc_sync("worker1", kAdd, 5, 6), 11);
    }
  });
}

// peer: rpc_test.py deadlock: same: with one handler thread per worker
TEST(RpcConformance, Deadlock) {
  ClusterOptions options = world_of(3, functions());
  options.threads = 1;
  on_all(options, [](Worker& worker) {
    auto slow = worker.rpc_async((worker.rank() + 1) % 3, kSlow);
    worker.barrier();
    EXPECT_FALSE(slow.done());
    slow.wait();
    worker.barrier();
    EXPECT_EQ(worker.rpc_sync((worker.rank() + 2) % 3, kAdd, 1, 2), 3);
  });
}

}  // namespace
}  // namespace torchspan::rpc_errors
