// Traced training on two workers: what `torchspan trace` shows of the modules that the program names.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include <ATen/core/ivalue.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <torchspan/autograd.h>
#include <torchspan/core/observation.h>
#include <torchspan/data_parallel.h>
#include <torchspan/engine/operator_trace.h>
#include <torchspan/session.h>

#include "tests/support/cluster_main.h"

namespace torchspan::module_spans_test {
namespace {

using nlohmann::json;
using testing::Process;
using testing::TemporaryFolder;

constexpr int kSteps = 3;

/// Steps of DistributedDataParallel, and one backward that leaves the process.
void train() {
  Session session(WorkerOptions::from_env());
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Linear(8, 2));
  torch::nn::Linear head(2, 2);
  OperatorTrace operators(session);
  operators.add("net", *net);
  operators.add("head", *head);
  DistributedDataParallel ddp(net, session.group());
  for (std::uint64_t number = 1; number <= kSteps; ++number) {
    const Span step(session, "step", number);
    ddp.forward(torch::randn({4, 6})).sum().backward();
  }
  {
    const Span step(session, "context");
    autograd::Context context(session);
    context.backward(head->forward(torch::randn({4, 2})).sum());
  }
  session.shutdown();
}

json merged_trace(const std::string& folder) {
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = (self.parent_path() / "torchspan").string();
  const auto executor = make_executor();
  const std::string out = folder + "/run.json", trace = folder + "/trace";
  Process run(testing::launched({"-n", "2", "--trace", trace}),
              {{"TORCHSPAN_TEST_SCENARIO", "module_spans.train"}, {"OMP_NUM_THREADS", "1"}},
              folder + "/run.out");
  EXPECT_TRUE(run.wait(*executor, std::chrono::seconds(100)));
  EXPECT_EQ(run.exit_code(), 0) << run.output();
  Process merge({command, "trace", trace, "-o", out}, {}, folder + "/trace.out");
  EXPECT_TRUE(merge.wait(*executor, std::chrono::seconds(60)));
  EXPECT_EQ(merge.exit_code(), 0) << merge.output();
  return json::parse(std::ifstream(out));
}

TEST(ModuleSpansOfAJob, LieInsideTheStepsOfEachRank) {
  const TemporaryFolder folder;
  const json document = merged_trace(folder.path());
  std::map<std::pair<int, std::string>, std::vector<json>> slices;
  for (const json& event : document["traceEvents"]) {
    if (event["ph"] == "X") slices[{event["pid"], event["name"]}].push_back(event);
  }
  const auto inside = [](const json& inner, const json& outer) {
    return inner["ts"] >= outer["ts"] && inner["ts"].get<double>() + inner["dur"].get<double>() <=
                                             outer["ts"].get<double>() + outer["dur"].get<double>() + 0.001;
  };
  for (int rank = 0; rank < 2; ++rank) {
    const auto& steps = slices[{rank, "step"}];
    ASSERT_EQ(steps.size(), static_cast<std::size_t>(kSteps));
    for (const char* direction : {"forward ", "backward "}) {
      for (const char* module : {"net", "net.0", "net.2"}) {
        const auto& calls = slices[{rank, std::string(direction) + module}];
        ASSERT_EQ(calls.size(), steps.size()) << direction << module;
        for (std::size_t i = 0; i < steps.size(); ++i) {
          EXPECT_TRUE(inside(calls[i], steps[i])) << calls[i] << steps[i];
          EXPECT_TRUE(inside(calls[i], slices[{rank, std::string(direction) + "net"}][i])) << calls[i];
          EXPECT_EQ(calls[i]["tid"], steps[i]["tid"]) << "forward and backward run on the training thread";
        }
      }
      const auto& head = slices[{rank, std::string(direction) + "head"}];
      ASSERT_EQ(head.size(), 1u) << direction;
      EXPECT_TRUE(inside(head[0], slices[{rank, "context"}].at(0)));
    }
    const auto& nodes = slices[{rank, "AddmmBackward0"}];
    EXPECT_GE(nodes.size(), static_cast<std::size_t>(2 * kSteps + 1));
  }
}

const testing::Scenarios kScenarios("module_spans", {{"train", train}});

}  // namespace
}  // namespace torchspan::module_spans_test
