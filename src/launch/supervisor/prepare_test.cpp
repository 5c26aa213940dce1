#include "launch/supervisor/prepare.h"

#include <algorithm>
#include <arpa/inet.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>
#include <torchspan/rendezvous.h>

namespace torchspan::launch::prepare_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string error_text_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.message();
  }
  return "nothing was thrown";
}

JobSetting setting() {
  JobSetting setting;
  setting.workers = 3;
  setting.run_id = "id";
  setting.master_port = 21000;
  setting.secret_file = "/s";
  setting.runtime_folder = "/r";
  setting.cores = 8;
  return setting;
}

TEST(WorkerEnvironment, IsReadBackByTheRendezvous) {
  const Environment base = {{"PATH", "/bin"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"RANK", "9"}};
  for (int rank = 0; rank < 3; ++rank) {
    const auto worker = rendezvous::read_environment(worker_environment(base, setting(), rank));
    EXPECT_EQ(worker.rank, rank);
    EXPECT_EQ(worker.world_size, 3);
    EXPECT_EQ(worker.local_rank, rank);
    EXPECT_EQ(worker.local_world_size, 3);
    EXPECT_EQ(worker.name, "worker" + std::to_string(rank));
    EXPECT_EQ(worker.store_address(), "tcp:127.0.0.1:21000");
    EXPECT_EQ(worker.job, "id");
    EXPECT_EQ(worker.secret_file, "/s");
    EXPECT_TRUE(worker.secret_named);
    EXPECT_EQ(worker.runtime_folder, "/r");
  }
}

TEST(WorkerEnvironment, KeepsInheritedVariablesAndPrefersTheUsers) {
  JobSetting mine = setting();
  mine.extra = {{"TORCHSPAN_NAME", "me"}, {"A", "b c"}};
  const Environment environment = worker_environment({{"PATH", "/bin"}, {"A", "old"}}, mine, 1);
  EXPECT_EQ(environment.at("PATH"), "/bin");
  EXPECT_EQ(environment.at("TORCHSPAN_NAME"), "me");
  EXPECT_EQ(environment.at("A"), "b c");
}

TEST(WorkerEnvironment, DividesTheCoresUnlessTheUserDid) {
  EXPECT_EQ(worker_environment({}, setting(), 0).at("OMP_NUM_THREADS"), "2");
  EXPECT_EQ(chosen_threads({}, setting()), 2);
  JobSetting many = setting();
  many.workers = 100;
  EXPECT_EQ(worker_environment({}, many, 0).at("OMP_NUM_THREADS"), "1");
  EXPECT_EQ(worker_environment({{"OMP_NUM_THREADS", "7"}}, setting(), 0).at("OMP_NUM_THREADS"), "7");
  EXPECT_EQ(chosen_threads({{"OMP_NUM_THREADS", "7"}}, setting()), 0);
}

class Programs : public ::testing::Test {
 protected:
  Programs() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    std::ofstream(folder_ + "/plain") << "x";
    std::ofstream(folder_ + "/program") << "x";
    chmod((folder_ + "/program").c_str(), 0700);
    mkdir((folder_ + "/folder").c_str(), 0700);
  }
  ~Programs() override { std::filesystem::remove_all(folder_); }
  std::string folder_;
};

TEST_F(Programs, AreFoundThroughPathOrByTheirFullName) {
  EXPECT_EQ(find_program("program", {{"PATH", "/nowhere:" + folder_}}), folder_ + "/program");
  EXPECT_EQ(find_program(folder_ + "/program", {}), folder_ + "/program");
  EXPECT_EQ(find_program("sh", {}).substr(0, 1), "/");
}

TEST_F(Programs, ThatCannotRunAreNamed) {
  EXPECT_THAT(error_text_of([&] {
                find_program("no-such-program", {{"PATH", folder_}});
              }),
              AllOf(HasSubstr("'no-such-program'"), HasSubstr(folder_)));
  EXPECT_THAT(error_text_of([&] { find_program("plain", {{"PATH", folder_}}); }), HasSubstr("in PATH"));
  EXPECT_THAT(error_text_of([&] { find_program("folder", {{"PATH", folder_}}); }), HasSubstr("in PATH"));
  EXPECT_THAT(error_text_of([&] { find_program(folder_ + "/missing", {}); }), HasSubstr("/missing"));
  EXPECT_THAT(error_text_of([&] { find_program(folder_ + "/plain", {}); }), HasSubstr("chmod +x"));
  EXPECT_THAT(error_text_of([&] { find_program(folder_ + "/folder", {}); }), HasSubstr("is a folder"));
  EXPECT_THAT(error_text_of([&] { find_program("", {}); }), HasSubstr("empty"));
}

TEST(Ports, AreFreeBelowTheRangeOfOutgoingConnectionsOrRefused) {
  const int socket_descriptor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  ASSERT_EQ(bind(socket_descriptor, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(socket_descriptor, 1), 0);
  ASSERT_EQ(getsockname(socket_descriptor, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const std::uint16_t taken = ntohs(address.sin_port);
  const std::string range = std::to_string(taken);
  EXPECT_THAT(error_text_of([&] { check_port(taken); }), HasSubstr("port " + range));
  EXPECT_THAT(error_text_of([&] { choose_store_port(range); }), HasSubstr("no port of " + range));
  close(socket_descriptor);
  check_port(taken);
  {
    const ReservedPort store = choose_store_port(range);
    EXPECT_EQ(store.number(), taken);
    EXPECT_THAT(error_text_of([&] { choose_store_port(range); }), HasSubstr("no port of " + range));
  }
  for (const std::uint16_t port : {choose_port().number(), choose_store_port("").number()}) {
    EXPECT_GE(port, 20000);
    EXPECT_LT(port, 32768);
  }
}

TEST_F(Programs, OfAJobHaveAPrivateFolderThatIsRemovedWithIt) {
  std::string path;
  {
    const JobFolder job({{"TMPDIR", folder_}});
    path = job.path();
    EXPECT_THAT(path, HasSubstr(folder_));
    struct stat about {};
    ASSERT_EQ(stat(path.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 07777, 0700u);
    ASSERT_EQ(stat(job.runtime_folder().c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 07777, 0700u);
    ASSERT_EQ(stat(job.secret_file().c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 07777, 0600u);
    EXPECT_GE(net::Secret::from_file(job.secret_file()).bytes().size(), 16u);
    const JobFolder other({{"TMPDIR", folder_}});
    EXPECT_NE(other.path(), path);
    EXPECT_FALSE(std::ranges::equal(net::Secret::from_file(other.secret_file()).bytes(),
                                    net::Secret::from_file(job.secret_file()).bytes()));
    std::ofstream(job.runtime_folder() + "/socket") << "x";
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_F(Programs, OfAJobRemoveOnlyAbandonedFoldersOfOtherJobs) {
  // A folder with the right name and other contents, and one whose contents match only partly.
  for (const std::string name : {"torchspan.abcdef", "torchspan.abandon", "torchspan-501"}) {
    ASSERT_EQ(mkdir((folder_ + "/" + name).c_str(), 0700), 0);
    std::ofstream(folder_ + "/" + name + "/secret") << "s";
  }
  std::ofstream(folder_ + "/torchspan.abcdef/notes") << "precious";
  std::ofstream(folder_ + "/torchspan.abandon/secret.0abb45") << "half written by a launcher that was killed";
  const JobFolder running({{"TMPDIR", folder_}});
  const JobFolder other({{"TMPDIR", folder_}});
  EXPECT_TRUE(std::filesystem::exists(running.secret_file()));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/torchspan.abcdef/secret"));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/torchspan-501/secret"));
  EXPECT_FALSE(std::filesystem::exists(folder_ + "/torchspan.abandon"));
}

TEST_F(Programs, OfAJobAvoidFoldersTooLongForSockets) {
  const std::string deep = folder_ + "/" + std::string(50, 'd');
  ASSERT_EQ(mkdir(deep.c_str(), 0700), 0);
  const JobFolder job({{"TMPDIR", deep}});
  EXPECT_LE(job.runtime_folder().size(), 60u);
}

TEST_F(Programs, OfAJobAvoidRelativeFolders) {
  const JobFolder job({{"TMPDIR", "."}, {"XDG_RUNTIME_DIR", "./"}});
  EXPECT_EQ(job.runtime_folder().substr(0, 1), "/") << "a worker may change its folder";
}

}  // namespace
}  // namespace torchspan::launch::prepare_test
