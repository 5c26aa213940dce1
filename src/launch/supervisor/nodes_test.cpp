#include <cstdlib>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/detail/net/secret.h>

#include "launch/supervisor/prepare.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::launch::nodes_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

class Nodes : public ::testing::Test {
 protected:
  Nodes() { net::Secret::random().write_file(folder_.path() + "/secret"); }

  NodePlace read(const NodeOptions& options) const { return read_node_options(options, environment()); }
  Environment environment() const { return {{"TORCHSPAN_SECRET_FILE", folder_.path() + "/secret"}}; }
  std::string refusal(const NodeOptions& options) const {
    const Error error = error_of([&] { read(options); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    return error.message();
  }

  testing::TemporaryFolder folder_;
};

TEST_F(Nodes, OneHostNeedsNoOptions) {
  EXPECT_FALSE(read({}).several());
  EXPECT_FALSE(read({.nodes = "1", .node_rank = "0"}).several());
}

TEST_F(Nodes, ReadsThePlaceOfAPodOfTheKubernetesTrainer) {
  Environment pod = environment();
  pod.merge(Environment{{"PET_NNODES", "3"},
                        {"PET_NODE_RANK", "2"},
                        {"PET_MASTER_ADDR", "train-node-0-0.train"},
                        {"PET_MASTER_PORT", "29511"}});
  const NodePlace place = read_node_options({}, pod);
  EXPECT_EQ(place.count, 3);
  EXPECT_EQ(place.node_rank, 2);
  EXPECT_EQ(place.rdzv_host, "train-node-0-0.train");
  EXPECT_EQ(place.rdzv_port, 29511);
  EXPECT_EQ(read_node_options({.rdzv = "10.0.0.1:5"}, pod).rdzv_host, "10.0.0.1") << "options come first";
  EXPECT_FALSE(read_node_options({.nodes = "1"}, pod).several());
  pod["PET_MASTER_ADDR"] = "fd00::1";
  EXPECT_EQ(read_node_options({}, pod).rdzv_host, "fd00::1");
  pod["PET_NNODES"] = "1";
  EXPECT_FALSE(read_node_options({}, pod).several());
  for (const auto& [name, value] : {std::pair("PET_NNODES", "2:4"), std::pair("PET_NODE_RANK", "3"),
                                    std::pair("PET_MASTER_ADDR", ""), std::pair("PET_MASTER_PORT", "x")}) {
    Environment wrong = environment();
    wrong.merge(Environment{{name, value}});
    wrong.merge(Environment{
        {"PET_NNODES", "3"}, {"PET_NODE_RANK", "2"}, {"PET_MASTER_ADDR", "a"}, {"PET_MASTER_PORT", "29511"}});
    const Error error = error_of([&] { read_node_options({}, wrong); });
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr(name)) << value;
  }
}

TEST_F(Nodes, ReadsAddresses) {
  const auto place = [&](const std::string& rdzv) {
    return read({.nodes = "2", .node_rank = "1", .rdzv = rdzv});
  };
  EXPECT_EQ(place("node0").rdzv_host, "node0");
  EXPECT_EQ(place("node0").rdzv_port, 29500);
  EXPECT_EQ(place("10.0.0.1:4711").rdzv_host, "10.0.0.1");
  EXPECT_EQ(place("10.0.0.1:4711").rdzv_port, 4711);
  EXPECT_EQ(place("[fd00::1]:4711").rdzv_host, "fd00::1");
  EXPECT_EQ(place("[fd00::1]:4711").rdzv_port, 4711);
  EXPECT_EQ(place("fd00::1").rdzv_host, "fd00::1");
  for (const char* wrong : {":80", "node0:", "node0:0", "node0:65536", "node0:x", "[]:1"}) {
    EXPECT_THAT(refusal({.nodes = "2", .node_rank = "1", .rdzv = wrong}), HasSubstr("--rdzv")) << wrong;
  }
}

TEST_F(Nodes, NamesTheWrongOption) {
  EXPECT_THAT(refusal({.nodes = "two", .node_rank = "0", .rdzv = "a"}), HasSubstr("--nnodes two"));
  EXPECT_THAT(refusal({.nodes = "0"}), HasSubstr("--nnodes 0"));
  EXPECT_THAT(refusal({.nodes = "2", .node_rank = "2", .rdzv = "a"}), HasSubstr("--node-rank 2"));
  EXPECT_THAT(refusal({.nodes = "2", .rdzv = "a"}), HasSubstr("--node-rank"));
  EXPECT_THAT(refusal({.nodes = "2", .node_rank = "0"}), HasSubstr("--rdzv"));
  EXPECT_THAT(refusal({.node_rank = "1"}), HasSubstr("--nnodes"));
  EXPECT_THAT(refusal({.rdzv = "a"}), HasSubstr("--nnodes"));
}

TEST_F(Nodes, RequireASecretThatAllHostsHave) {
  const NodeOptions options{.nodes = "2", .node_rank = "0", .rdzv = "a"};
  const Error error = error_of([&] {
    read_node_options(options, {{"TORCHSPAN_SECRET_FILE", folder_.path() + "/none"}});
  });
  EXPECT_THAT(error.message(), HasSubstr("the same file on every host"));
  EXPECT_THAT(error.message(), HasSubstr(folder_.path() + "/none"));
  EXPECT_TRUE(read_node_options(options, {{"TORCHSPAN_CERTIFICATE_FILE", "/c.pem"}}).several());
}

TEST_F(Nodes, NumberTheWorkersOfAllHosts) {
  JobSetting setting;
  setting.workers = 4;
  setting.run_id = "launcher";
  setting.secret_file = "/the/launchers/own";
  setting.nodes = read({.nodes = "3", .node_rank = "2", .rdzv = "node0:4711", .port_range = "5000-5100"});
  const Environment worker = worker_environment(environment(), setting, 1);
  const auto identity = rendezvous::read_environment(worker);
  EXPECT_EQ(identity.rank, 9);
  EXPECT_EQ(identity.world_size, 12);
  EXPECT_EQ(identity.local_rank, 1);
  EXPECT_EQ(identity.local_world_size, 4);
  EXPECT_EQ(identity.name, "worker9");
  EXPECT_EQ(identity.store_address(), "tls:node0:4711");
  EXPECT_EQ(identity.secret_file, folder_.path() + "/secret");
  EXPECT_EQ(worker.at("GROUP_RANK"), "2");
  EXPECT_EQ(worker.at("TORCHSPAN_PORT_RANGE"), "5000-5100");
  setting.nodes.node_rank = 0;
  const auto first = rendezvous::read_environment(worker_environment(environment(), setting, 0));
  EXPECT_EQ(first.rank, 0);
  EXPECT_EQ(first.job, identity.job) << "the hosts' launchers start one job";
  setting.nodes.job_id = "another";
  const auto other = rendezvous::read_environment(worker_environment(environment(), setting, 0));
  EXPECT_NE(other.job, identity.job);
}

}  // namespace
}  // namespace torchspan::launch::nodes_test
