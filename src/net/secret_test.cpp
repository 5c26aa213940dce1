#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/net/secret.h>

namespace torchspan::net::secret_test {
namespace {

using ::testing::HasSubstr;

class SecretFile : public ::testing::Test {
 protected:
  SecretFile() {
    std::string name = ::testing::TempDir() + "torchspan-secret-XXXXXX";
    directory_ = mkdtemp(name.data());
  }
  ~SecretFile() override { std::filesystem::remove_all(directory_); }

  std::string path(const std::string& name = "secret") const { return directory_ + "/" + name; }
  std::string write(const std::string& text, mode_t mode = 0600) const {
    std::ofstream(path(), std::ios::binary) << text;
    EXPECT_EQ(chmod(path().c_str(), mode), 0);
    return path();
  }
  static Error failure_of(const std::string& path) {
    try {
      Secret::from_file(path);
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "reading " << path << " did not throw";
    return Error(ErrorKind::kInvalid, "");
  }
  static Bytes bytes_of(const Secret& secret) { return {secret.bytes().begin(), secret.bytes().end()}; }

  std::string directory_;
};

TEST(Secret, IsRefusedWhenShorterThanSixteenBytes) {
  EXPECT_NO_THROW(Secret::from_bytes(Bytes(16)));
  EXPECT_THROW(Secret::from_bytes(Bytes(15)), Error);
  EXPECT_THROW(Secret::from_bytes({}), Error);
}

TEST(Secret, RandomGivesThirtyTwoNewBytesEachTime) {
  const Secret one = Secret::random(), other = Secret::random();
  EXPECT_EQ(one.bytes().size(), 32u);
  EXPECT_FALSE(std::ranges::equal(one.bytes(), other.bytes()));
}

TEST(Secret, DerivesADifferentSecretForEachUse) {
  const Secret secret = Secret::from_bytes(Bytes(16, std::byte{1})), other = Secret::from_bytes(Bytes(16));
  const auto bytes = [](const Secret& one) { return Bytes(one.bytes().begin(), one.bytes().end()); };
  const Bytes store = bytes(secret.derived("store"));
  EXPECT_EQ(store.size(), 32u);
  EXPECT_EQ(store, bytes(secret.derived("store")));
  EXPECT_NE(store, bytes(secret.derived("stores")));
  EXPECT_NE(store, bytes(other.derived("store")));
  EXPECT_THROW(Secret().derived("store"), Error);
}

TEST_F(SecretFile, ReadsTheSecretThatWasWritten) {
  const Secret secret = Secret::random();
  secret.write_file(path());
  EXPECT_EQ(bytes_of(Secret::from_file(path())), bytes_of(secret));
}

TEST_F(SecretFile, IsReadableByItsOwnerOnly) {
  Secret::random().write_file(path());
  struct stat about {};
  ASSERT_EQ(stat(path().c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 07777, 0600u);
}

TEST_F(SecretFile, IsNeverOverwritten) {
  const Secret first = Secret::random();
  first.write_file(path());
  EXPECT_THROW(Secret::random().write_file(path()), Error);
  EXPECT_EQ(bytes_of(Secret::from_file(path())), bytes_of(first));
}

TEST_F(SecretFile, LeavesNothingElseInItsDirectory) {
  Secret::random().write_file(path());
  EXPECT_THROW(Secret::random().write_file(path()), Error);
  const auto files = std::filesystem::directory_iterator(directory_);
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

TEST_F(SecretFile, IsDeniedWhenOthersMayReadIt) {
  const Error error = failure_of(write("0123456789abcdef0123456789abcdef", 0640));
  EXPECT_EQ(error.kind(), ErrorKind::kDenied);
  EXPECT_THAT(error.message(), HasSubstr("chmod 600 '" + path() + "'"));
}

TEST_F(SecretFile, NamesTheCommandThatMakesOneWhenItIsMissingOrShort) {
  for (const Error& error :
       {failure_of(path("missing")), failure_of(write("short")), failure_of(write(""))}) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("(umask 077; openssl rand -hex 32"));
  }
  EXPECT_THAT(failure_of(path("no/secret")).message(),
              HasSubstr("(umask 077; mkdir -p '" + path("no") + "'; openssl rand -hex 32"));
}

TEST_F(SecretFile, IsRefusedWhenItIsADirectoryOrHuge) {
  EXPECT_EQ(failure_of(directory_).kind(), ErrorKind::kInvalid);
  EXPECT_EQ(failure_of(write(std::string(5000, 'x'))).kind(), ErrorKind::kInvalid);
}

TEST_F(SecretFile, ReadsHexadecimalAndPlainTextAlikeWithOrWithoutNewline) {
  const std::string hex = "000102030405060708090a0b0c0d0e0f";
  Bytes spelled;
  for (int i = 0; i < 16; ++i) spelled.push_back(static_cast<std::byte>(i));
  EXPECT_EQ(bytes_of(Secret::from_file(write(hex))), spelled);
  EXPECT_EQ(bytes_of(Secret::from_file(write(hex + "\n"))), spelled);
  EXPECT_EQ(bytes_of(Secret::from_file(write("correct horse battery staple\n"))),
            bytes_of(Secret::from_file(write("correct horse battery staple"))));
}

}  // namespace
}  // namespace torchspan::net::secret_test
