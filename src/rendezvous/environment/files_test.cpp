#include <algorithm>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "rendezvous/api/environment.h"

namespace torchspan::rendezvous::files_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Files : public ::testing::Test {
 protected:
  Files() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    worker_.secret_file = folder_ + "/home/secret";
  }
  ~Files() override { std::filesystem::remove_all(folder_); }

  Error secret_error() const {
    try {
      load_secret(worker_);
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorKind::kInvalid, "nothing was thrown");
  }
  Error folder_error() const {
    try {
      make_runtime_folder(worker_);
    } catch (const Error& error) {
      return error;
    }
    return Error(ErrorKind::kInvalid, "nothing was thrown");
  }
  static unsigned mode(const std::string& path) {
    struct stat about {};
    EXPECT_EQ(stat(path.c_str(), &about), 0);
    return about.st_mode & 07777;
  }

  std::string folder_;
  WorkerEnvironment worker_;
};

TEST_F(Files, DefaultSecretIsMadeOnceForItsOwnerOnly) {
  const auto first = load_secret(worker_);
  EXPECT_EQ(mode(worker_.secret_file), 0600u);
  EXPECT_EQ(mode(folder_ + "/home"), 0700u);
  EXPECT_TRUE(std::ranges::equal(load_secret(worker_).bytes(), first.bytes()));
}

TEST_F(Files, WorkersThatStartTogetherAgreeOnOneSecret) {
  const auto executor = make_executor();
  std::vector<net::Secret> secrets(8);
  {
    std::vector<Thread> threads;
    for (auto& secret : secrets) {
      threads.push_back(executor->spawn("worker", [&] { secret = load_secret(worker_); }));
    }
  }
  for (const auto& secret : secrets) EXPECT_TRUE(std::ranges::equal(secret.bytes(), secrets[0].bytes()));
}

TEST_F(Files, NamedSecretThatIsMissingIsAnErrorWithTheCommandToRun) {
  worker_.secret_named = true;
  EXPECT_THAT(secret_error().message(), AllOf(HasSubstr(worker_.secret_file), HasSubstr("umask 077")));
  EXPECT_FALSE(std::filesystem::exists(worker_.secret_file));
}

TEST_F(Files, CommandOfTheErrorMakesASecretAndItsFolder) {
  worker_.secret_named = true;
  const std::string text = secret_error().message();
  const std::size_t begin = text.find("(umask"), end = text.rfind(')');
  ASSERT_LT(begin, end) << text;
  ASSERT_EQ(std::system(text.substr(begin, end + 1 - begin).c_str()), 0) << text;
  EXPECT_EQ(mode(folder_ + "/home"), 0700u);
  EXPECT_GE(load_secret(worker_).bytes().size(), 32u);
}

TEST_F(Files, SeveralHostsDoNotEachMakeASecret) {
  worker_.world_size = 2;
  EXPECT_THAT(secret_error().message(), AllOf(HasSubstr("several hosts"), HasSubstr("umask 077")));
  EXPECT_FALSE(std::filesystem::exists(worker_.secret_file));
}

TEST_F(Files, SecretOpenToOthersIsDenied) {
  load_secret(worker_);
  ASSERT_EQ(chmod(worker_.secret_file.c_str(), 0644), 0);
  EXPECT_EQ(secret_error().kind(), ErrorKind::kDenied);
}

TEST_F(Files, WithoutHomeOrNamedFileThereIsNoSecret) {
  worker_.secret_file.clear();
  EXPECT_THAT(secret_error().message(), HasSubstr("TORCHSPAN_SECRET_FILE"));
}

TEST_F(Files, RuntimeFolderIsPrivateAndReused) {
  worker_.temporary_folder = folder_;
  const std::string path = make_runtime_folder(worker_);
  EXPECT_EQ(path, folder_ + "/torchspan-" + std::to_string(geteuid()));
  EXPECT_EQ(mode(path), 0700u);
  EXPECT_EQ(make_runtime_folder(worker_), path);
  worker_.runtime_folder = folder_ + "/named";
  EXPECT_EQ(make_runtime_folder(worker_), folder_ + "/named");
}

/// Makes a socket file; `old` gives it the time of a worker that started a while ago.
int make_socket(const std::string& path, bool old) {
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const timespec when[2] = {{1'000'000'000, 0}, {1'000'000'000, 0}};
  if (old) {
    EXPECT_EQ(utimensat(AT_FDCWD, path.c_str(), when, 0), 0);
  }
  return fd;
}

TEST_F(Files, RuntimeFolderDropsTheSocketsOfKilledProcesses) {
  worker_.runtime_folder = folder_ + "/run";
  const std::string run = make_runtime_folder(worker_);
  const int dead = make_socket(run + "/dead.sock", true);
  const int young = make_socket(run + "/young.sock", false);
  const int alive = make_socket(run + "/alive.sock", true);
  ASSERT_EQ(listen(alive, 1), 0);
  ASSERT_EQ(fcntl(alive, F_SETFL, O_NONBLOCK), 0);
  close(dead);
  std::ofstream(run + "/notes.sock") << "no socket";
  make_runtime_folder(worker_);
  EXPECT_FALSE(std::filesystem::exists(run + "/dead.sock"));
  EXPECT_TRUE(std::filesystem::exists(run + "/young.sock")) << "it may be about to listen";
  EXPECT_TRUE(std::filesystem::exists(run + "/alive.sock"));
  EXPECT_TRUE(std::filesystem::exists(run + "/notes.sock"));
  EXPECT_LT(accept4(alive, nullptr, nullptr, SOCK_NONBLOCK), 0) << "the other job heard of the visit";
  EXPECT_EQ(errno, EAGAIN);
  close(young);
  close(alive);
}

TEST_F(Files, RuntimeFolderOpenToOthersIsDenied) {
  worker_.runtime_folder = folder_ + "/open";
  ASSERT_EQ(mkdir(worker_.runtime_folder.c_str(), 0700), 0);
  ASSERT_EQ(chmod(worker_.runtime_folder.c_str(), 0755), 0);
  EXPECT_EQ(folder_error().kind(), ErrorKind::kDenied);
}

TEST_F(Files, RuntimeFolderIsNeverAFileALinkOrTooLong) {
  worker_.runtime_folder = folder_ + "/file";
  std::ofstream(worker_.runtime_folder) << "x";
  EXPECT_THAT(folder_error().message(), HasSubstr("is not a folder"));
  worker_.runtime_folder = folder_ + "/link";
  ASSERT_EQ(symlink(folder_.c_str(), worker_.runtime_folder.c_str()), 0);
  EXPECT_THAT(folder_error().message(), HasSubstr("is not a folder"));
  worker_.runtime_folder = folder_ + "/" + std::string(60, 'x');
  EXPECT_THAT(folder_error().message(), HasSubstr("TORCHSPAN_RUNTIME_DIR"));
  worker_.runtime_folder = folder_ + "/missing/deep";
  EXPECT_THAT(folder_error().message(), HasSubstr("cannot be created"));
}

}  // namespace
}  // namespace torchspan::rendezvous::files_test
