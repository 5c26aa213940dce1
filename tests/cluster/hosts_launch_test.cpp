// One job that two launchers start on two hosts, which are network namespaces connected by a virtual cable.
#include <filesystem>
#include <gmock/gmock.h>

#include <ATen/ATen.h>

#include <torchspan/session.h>

#include "tests/cluster/hosts_suite.h"

namespace torchspan {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using testing::join_on_host;
using testing::Process;
using testing::require;
using testing::TemporaryFolder;

/// A worker of either host: a group of all, and a sum over it.
void sum_of_all() {
  Session session = join_on_host();
  {
    const collective::Group group = session.group({.timeout = seconds(60)});
    require(group.size() == 4, "two workers on each of two hosts");
    require(group.backend()->name() == "hierarchical", group.backend()->name());
    at::Tensor mine = at::full({300000}, session.rank());
    group.all_reduce(mine).wait();
    require((mine == 6).all().item<bool>(), "the sum of all ranks");
  }
  session.shutdown(seconds(30));
}

class HostsLaunch : public testing::Hosts {
 protected:
  void SetUp() override {
    Hosts::SetUp();
    net::Secret::random().write_file(folder_.path() + "/secret");
  }
  /// The launcher of one host, as its user would start it.
  std::unique_ptr<Process> launch(int node, std::vector<std::string> options) const {
    const testing::TestHost& host = node == 0 ? network_.near : network_.far;
    const auto self = std::filesystem::read_symlink("/proc/self/exe");
    std::vector<std::string> command = host.through();
    command.push_back((self.parent_path() / "torchspan").string());
    for (const char* word : {"run", "--nnodes", "2", "--node-rank", node == 0 ? "0" : "1", "-n", "2"}) {
      command.emplace_back(word);
    }
    for (std::string& option : options) command.push_back(std::move(option));
    command.push_back(self.string());
    const std::map<std::string, std::string> variables{{"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"},
                                                       {"TORCHSPAN_TEST_SCENARIO", "sum_of_all"},
                                                       {"TEST_HOST", node == 0 ? "near" : "far"}};
    return std::make_unique<Process>(command, variables, folder_.path() + "/output" + std::to_string(node));
  }

  const TemporaryFolder folder_;
};

TEST_F(HostsLaunch, StartsOneJobOnBothHosts) {
  const auto executor = make_executor();
  const std::string rdzv = std::string(testing::TestNetwork::kNear) + ":29650";
  const auto far = launch(1, {"--rdzv", rdzv, "--port-range", "29660-29699"});
  const auto near = launch(0, {"--rdzv", rdzv, "--port-range", "29660-29699"});
  for (Process* host : {near.get(), far.get()}) {
    ASSERT_TRUE(host->wait(*executor, seconds(90))) << host->output();
    EXPECT_EQ(host->exit_code(), 0) << host->output();
  }
}

TEST_F(HostsLaunch, EndsWithAnErrorIfTheOtherHostNeverStarts) {
  const auto executor = make_executor();
  const auto near = launch(0, {"--rdzv", std::string(testing::TestNetwork::kNear) + ":29651", "--env",
                               "TORCHSPAN_JOIN_TIMEOUT=2"});
  ASSERT_TRUE(near->wait(*executor, seconds(60))) << near->output();
  EXPECT_NE(near->exit_code(), 0);
  EXPECT_THAT(near->output(), HasSubstr("rank 2"));
}

}  // namespace
}  // namespace torchspan

int main(int argc, char** argv) {
  return torchspan::testing::cluster_main(argc, argv, {{"sum_of_all", torchspan::sum_of_all}});
}
