#include "launch/supervisor/worker_error.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <random>
#include <sys/stat.h>

#include "launch/whole_file.h"

namespace torchspan::launch::worker_error_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

/// What a Python program under torchrun's @record writes.
constexpr std::string_view kTorchrunFile =
    R"({"message": {"message": "ValueError: bad batch", "extraInfo": {"py_callstack": "Traceback (most recent call )"
    R"(last):\n  File \"train.py\"", "timestamp": "1700000000"}}})";

TEST(WorkerError, OfTorchrunIsDecoded) {
  const auto error = decode_worker_error(kTorchrunFile);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "ValueError: bad batch");
  EXPECT_THAT(error->callstack, HasSubstr("\n  File \"train.py\""));
  EXPECT_EQ(error->timestamp, 1700000000);
}

TEST(WorkerError, MayBePlainTextOrHaveANumberAsTime) {
  EXPECT_EQ(decode_worker_error(R"({"message": "CUDA error"})")->message, "CUDA error");
  const auto error = decode_worker_error(
      R"({"message": {"message": "x", "errorCode": 3, "extraInfo": {"timestamp": 17, "py_callstack": null}}})");
  EXPECT_EQ(error->timestamp, 17);
  EXPECT_EQ(error->callstack, "");
}

TEST(WorkerError, ThatIsMalformedIsIgnored) {
  for (const std::string text :
       {"", "{", "[]", "null", "{}", R"({"message": 5})", R"({"message": {}})",
        R"({"message": {"message": ["x"]}})", R"({"message": ""})", "\xff\xfe", "{\"message\": \"\xff\"}"}) {
    EXPECT_FALSE(decode_worker_error(text)) << text;
  }
  EXPECT_FALSE(decode_worker_error(std::string(kMostErrorBytes + 1, ' ')));
  EXPECT_FALSE(decode_worker_error(std::string(kMostErrorBytes, '[')));
}

TEST(WorkerError, WithRandomDamageIsDecodedOrIgnored) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 2000; ++i) {
    std::string text(kTorchrunFile);
    for (int hit = 0; hit < 3; ++hit) text[random() % text.size()] = static_cast<char>(random());
    if (const auto error = decode_worker_error(text)) {
      EXPECT_FALSE(error->message.empty());
      EXPECT_LE(error->message.size(), text.size());
    }
  }
}

class WorkerErrorFile : public ::testing::Test {
 protected:
  WorkerErrorFile() {
    std::string pattern = (std::filesystem::temp_directory_path() / "torchspan-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ + "/error.json";
  }
  ~WorkerErrorFile() override { std::filesystem::remove_all(folder_); }
  std::string folder_, path_;
};

TEST_F(WorkerErrorFile, IsReadOnlyIfItIsASmallRegularFile) {
  EXPECT_FALSE(read_worker_error(path_));
  EXPECT_EQ(write_whole_file(path_, kTorchrunFile), "");
  EXPECT_EQ(read_worker_error(path_)->message, "ValueError: bad batch");
  const std::string link = folder_ + "/link", pipe = folder_ + "/pipe";
  std::filesystem::create_symlink(path_, link);
  EXPECT_FALSE(read_worker_error(link));
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(read_worker_error(pipe));
  EXPECT_FALSE(read_worker_error(folder_));
  std::filesystem::resize_file(path_, kMostErrorBytes + 1);
  EXPECT_FALSE(read_worker_error(path_));
}

TEST(WorkerError, IsShortenedForTheSummary) {
  EXPECT_EQ(shorten_message("a\x1b[2Kb\nc"), "a?[2Kb\n    c");
  EXPECT_EQ(shorten_message(std::string(2000, 'x')), std::string(2000, 'x'));
  EXPECT_EQ(shorten_message(std::string(2001, 'x')), std::string(2000, 'x') + " …");
  std::string many;
  for (int i = 0; i < 20; ++i) many += "l" + std::to_string(i) + "\n";
  EXPECT_THAT(shorten_message(many), HasSubstr("l9"));
  EXPECT_THAT(shorten_message(many), Not(HasSubstr("l10")));
  const std::string cut = shorten_message(std::string(1999, 'x') + "äöü");
  EXPECT_EQ(cut, std::string(1999, 'x') + "ä …");
}

TEST(WorkerError, IsPassedOnWithTheExitCode) {
  const Ending first{.rank = 1, .name = "worker1", .pid = 77, .code = 3};
  const Json passed = Json::parse(encode_job_error(decode_worker_error(kTorchrunFile), first, {}));
  EXPECT_EQ(passed["message"]["message"], "ValueError: bad batch");
  EXPECT_EQ(passed["message"]["errorCode"], 3);
  EXPECT_EQ(passed["message"]["extraInfo"]["timestamp"], "1700000000");
  Ending killed = first;
  killed.signal = SIGKILL;
  const Json made = Json::parse(encode_job_error(std::nullopt, killed, {.last_lines = {"a", "b\xff"}}));
  EXPECT_THAT(std::string(made["message"]["message"]),
              HasSubstr("worker1 (rank 1, pid 77) was killed by SIGKILL"));
  EXPECT_EQ(made["message"]["errorCode"], -SIGKILL);
  EXPECT_THAT(std::string(made["message"]["extraInfo"]["py_callstack"]), HasSubstr("a\nb"));
}

}  // namespace
}  // namespace torchspan::launch::worker_error_test
