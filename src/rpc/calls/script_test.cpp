#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>

#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"
#include "tests/support/errors.h"

namespace torchspan::script_test {
namespace {

using testing::ClusterOptions;
using ::testing::HasSubstr;
using testing::SimCluster;
using torchspan::testing::error_of;

std::shared_ptr<torch::jit::CompilationUnit> make_unit() {
  auto unit = std::make_shared<torch::jit::CompilationUnit>();
  unit->define(c10::QualifiedName("maths"), R"(
def affine(x: Tensor, by: float = 2.0, plus: int = 1) -> Tensor:
    return x * by + plus

def pair(x: Tensor) -> Tuple[Tensor, str]:
    return x.sum(), "summed"

def fail(text: str) -> int:
    assert len(text) > 100, text
    return 0
)",
               torch::jit::nativeResolver(), nullptr);
  return unit;
}

/// Makes a module that adds up its inputs and counts them.
torch::jit::Module make_accumulator(double start) {
  torch::jit::Module module("Accumulator");
  module.register_buffer("total", at::full({2}, start));
  module.register_attribute("calls", c10::IntType::get(), std::int64_t{0});
  module.define(R"(
def forward(self, x: Tensor) -> Tensor:
    self.total.add_(x)
    self.calls = self.calls + 1
    return self.total

def count(self) -> int:
    return self.calls
)");
  return module;
}
constexpr Function<make_accumulator> kAccumulator{"make_accumulator"};
c10::IValue make_object(double start) { return make_accumulator(start)._ivalue(); }
constexpr Function<make_object> kObject{"make_object"};

void on_first(const std::function<void(Worker&)>& body) {
  ClusterOptions options;
  options.functions.add(kAccumulator, kObject);
  options.functions.add_script(make_unit());
  options.functions.add_script("accumulator", make_accumulator(100));
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

TEST(Script, CallsFunctionsByQualifiedNameWithDefaultsAndKeywords) {
  on_first([](Worker& worker) {
    const at::Tensor x = at::arange(4, at::kFloat);
    for (const int to : {1, 0}) {
      EXPECT_TRUE(at::equal(worker.rpc_sync(to, "maths.affine", {x}).toTensor(), x * 2 + 1));
      EXPECT_TRUE(at::equal(worker.rpc_sync(to, "maths.affine", {x, 3.0}).toTensor(), x * 3 + 1));
      EXPECT_TRUE(at::equal(worker.rpc_sync(to, "maths.affine", {x}, {{"plus", 5}}).toTensor(), x * 2 + 5));
      EXPECT_TRUE(at::equal(
          worker.rpc_sync(to, "maths.affine", {}, {{"x", x}, {"by", 0.5}, {"plus", 0}}).toTensor(), x * 0.5));
      const auto pair = worker.rpc_async(to, "maths.pair", {x}).wait().toTuple();
      EXPECT_EQ(pair->elements()[0].toTensor().item<float>(), 6);
      EXPECT_EQ(pair->elements()[1].toStringRef(), "summed");
      EXPECT_TRUE(at::equal(worker.remote(to, "maths.affine", {x}).to_here().toTensor(), x * 2 + 1));
    }
  });
}

TEST(Script, NamesTheSchemaThatTheArgumentsDoNotFit) {
  on_first([](Worker& worker) {
    const at::Tensor x = at::ones({2});
    const std::map<std::string, c10::IValue> none;
    for (const auto& given :
         std::vector<std::pair<std::vector<c10::IValue>, decltype(none)>>{{{}, none},
                                                                          {{x, 1.0, 2, 3}, none},
                                                                          {{x}, {{"unheard_of", 1}}},
                                                                          {{"text"}, none},
                                                                          {{x}, {{"x", x}}}}) {
      const Error error = error_of([&] { worker.rpc_sync(1, "maths.affine", given.first, given.second); });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      EXPECT_THAT(error.message(), HasSubstr("affine(Tensor x, float by=2., int plus=1)"));
    }
  });
}

TEST(Script, ReportsTheFailureOfAScript) {
  on_first([](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_sync(1, "maths.fail", {"out of ink"}); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    ASSERT_EQ(error.frames().size(), 1u);
    EXPECT_EQ(error.frames()[0].call, "maths.fail");
    EXPECT_THAT(error.frames()[0].text, HasSubstr("out of ink"));
    EXPECT_THAT(error_of([&] { worker.remote(1, "maths.fail", {"no paper"}).to_here(); }).what(),
                HasSubstr("no paper"));
  });
}

TEST(Script, RefusesNamesThatNoTableHas) {
  on_first([](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_sync(1, "maths.unknown", {}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("maths.unknown"));
    EXPECT_THAT(error.message(), HasSubstr("add_script"));
  });
}

TEST(Script, CallsMethodsOfTheModuleThatTheCalleeHas) {
  on_first([](Worker& worker) {
    // All workers of this process share the module that the table was made with.
    const at::Tensor x = at::ones({2});
    EXPECT_TRUE(at::equal(worker.rpc_sync(1, "accumulator.forward", {x}).toTensor(), at::full({2}, 101.0)));
    EXPECT_TRUE(at::equal(worker.rpc_sync(1, "accumulator.forward", {x}).toTensor(), at::full({2}, 102.0)));
    EXPECT_EQ(worker.rpc_sync(1, "accumulator.count", {}).toInt(), 2);
  });
}

TEST(Script, CallsMethodsOfRemoteModulesAndObjects) {
  on_first([](Worker& worker) {
    for (const int to : {1, 0}) {
      for (int kind = 0; kind < 2; ++kind) {
        const auto check = [&](const auto& module) {
          const at::Tensor x = at::ones({2});
          EXPECT_TRUE(at::equal(module.rpc_sync("forward", {x}).toTensor(), at::full({2}, 11.0)));
          EXPECT_TRUE(
              at::equal(module.rpc_async("forward", {}, {{"x", x}}).wait().toTensor(), at::full({2}, 12.0)));
          EXPECT_TRUE(at::equal(module.remote("forward", {x}).to_here().toTensor(), at::full({2}, 13.0)));
          EXPECT_EQ(module.rpc_sync("count", {}).toInt(), 3);
          const Error error = error_of([&] { module.rpc_sync("backward", {}); });
          EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
          EXPECT_THAT(error.message(), HasSubstr("forward, count"));
          EXPECT_EQ(error.worker(), SimCluster::name(to));
        };
        if (kind == 0) {
          check(worker.remote(to, kAccumulator, 10.0));
        } else {
          check(worker.remote(to, kObject, 10.0));
        }
      }
    }
  });
}

TEST(Script, RejectsMethodsOfNonObjects) {
  on_first([](Worker& worker) {
    auto tensor = worker.remote(1, "aten::ones", {std::vector<std::int64_t>{2}});
    const Error error = error_of([&] { tensor.rpc_sync("forward", {}); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("not a TorchScript object"));
  });
}

TEST(Script, IsComparedWhenWorkersJoin) {
  FunctionTable with, without;
  with.add_script(make_unit());
  EXPECT_NE(with.digest(), without.digest());
  EXPECT_THROW(with.add_script(make_unit()), Error);
}

}  // namespace
}  // namespace torchspan::script_test
