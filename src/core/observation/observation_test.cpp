#include "core/api/observation.h"

#include <arpa/inet.h>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "core/api/text_server.h"
#include "core/observation/prometheus.h"
#include "core/observation/scalar_files.h"

namespace torchspan::observation_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;

struct TemporaryFolder {
  TemporaryFolder() : path(mkdtemp(name.data())) {}
  ~TemporaryFolder() { std::filesystem::remove_all(path); }
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_obsXXXXXX").string();
  std::string path;
};

std::string file_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int dial(std::uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return fd;
}

int dial(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(static_cast<char*>(address.sun_path), path.size());
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0) << strerror(errno);
  return fd;
}

std::string ask(int fd, const std::string& request) {
  EXPECT_EQ(send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string answer;
  char place[4096];
  for (ssize_t size; (size = recv(fd, place, sizeof place, 0)) > 0;)
    answer.append(place, static_cast<std::size_t>(size));
  close(fd);
  return answer;
}

std::string get(int fd, const std::string& path) {
  return ask(fd, "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
}

class ObservedWorker : public ::testing::Test {
 protected:
  std::unique_ptr<Observation> observe(const ObservationOptions& options) {
    return std::make_unique<Observation>(runtime_, options, identify(*executor_, "worker1", 1, 2),
                                         [](StateDetail) { return R"({"pending":[]})"; });
  }
  const std::unique_ptr<Executor> executor_ = make_executor();
  const std::shared_ptr<Runtime> runtime_ = std::make_shared<Runtime>(*executor_, "worker1", LogLevel::kOff);
};

TEST_F(ObservedWorker, ServesMetricsThatParse) {  // metrics_grammar
  const auto observation = observe({.metrics_port = 0});
  runtime_->metrics.counter("rpc.bytes_sent").add(7);
  runtime_->metrics.gauge("net.pool_bytes").add(9);
  runtime_->scalars.add("a \"tag\"\\\n", 0.5, std::nullopt, executor_->now());
  for (const int microseconds : {5, 30, 3000, 100'000'000}) {
    runtime_->spans.record(SpanKind::kCall, "f\"\n",
                           executor_->now() - std::chrono::microseconds(microseconds));
  }
  const std::string answer = get(dial(observation->metrics_port()), "/metrics?x=1");
  EXPECT_THAT(answer, HasSubstr("HTTP/1.0 200 OK"));
  EXPECT_THAT(answer, HasSubstr("Content-Type: text/plain; version=0.0.4"));
  EXPECT_THAT(answer, HasSubstr("torchspan_rpc_bytes_sent_total{rank=\"1\",worker=\"worker1\"} 7\n"));
  EXPECT_THAT(answer, HasSubstr("# TYPE torchspan_net_pool_bytes gauge\n"));
  EXPECT_THAT(answer, HasSubstr("tag=\"a \\\"tag\\\"\\\\\\n\"} 0.5\n"));
  const std::string body = answer.substr(answer.find("\r\n\r\n") + 4);
  EXPECT_EQ(body.back(), '\n');
  std::istringstream lines(body);
  std::map<std::string, int> families;
  std::string family;
  double last = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("# TYPE ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      EXPECT_EQ(++families[family], 1) << "a family has two parts: " << family;
      last = 0;
    } else if (!line.starts_with("#")) {
      EXPECT_TRUE(line.starts_with(family)) << line;
      const double value = std::stod(line.substr(line.rfind(' ')));
      if (line.find("_bucket") != std::string::npos) {
        EXPECT_GE(value, std::exchange(last, line.find("+Inf") != std::string::npos ? 0 : value)) << line;
      }
    }
  }
  EXPECT_THAT(body, HasSubstr(R"(function="f\"\n",le="+Inf"} 4)"));
  EXPECT_THAT(body, HasSubstr(R"(le="4e-05"} 2)"));
  EXPECT_THAT(body, HasSubstr(R"(_count{rank="1",worker="worker1",function="f\"\n"} 4)"));
}

TEST_F(ObservedWorker, AnswersOthersWhileAClientIsSlow) {
  const auto observation = observe({.metrics_port = 0});
  std::vector<int> slow;
  for (int i = 0; i < 8; ++i) {
    slow.push_back(dial(observation->metrics_port()));
    ASSERT_EQ(send(slow.back(), "GET /met", 8, MSG_NOSIGNAL), 8);
  }
  EXPECT_THAT(get(dial(observation->metrics_port()), "/metrics"), HasSubstr("200 OK"));
  EXPECT_THAT(get(dial(observation->metrics_port()), "/other"), HasSubstr("404"));
  EXPECT_THAT(ask(dial(observation->metrics_port()), "POST /metrics HTTP/1.1\r\n\r\n"), HasSubstr("405"));
  EXPECT_THAT(ask(dial(observation->metrics_port()), "rubbish\r\n\r\n"), HasSubstr("400"));
  EXPECT_THAT(ask(dial(observation->metrics_port()), std::string(5000, 'x')), HasSubstr("400"));
  for (const int fd : slow) close(fd);
}

TEST_F(ObservedWorker, WaitsForADescriptorWithoutSpinning) {
  const auto observation = observe({.metrics_port = 0});
  const int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  rlimit usual{};
  getrlimit(RLIMIT_NOFILE, &usual);
  const rlimit few{static_cast<rlim_t>(client) + 8, usual.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  std::vector<int> used;
  for (int fd = dup(client); fd >= 0; fd = dup(client)) used.push_back(fd);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(observation->metrics_port());
  EXPECT_EQ(connect(client, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::clock_t before = std::clock();
  executor_->sleep(500ms);
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 5) << "of the whole process";
  for (const int fd : used) close(fd);
  setrlimit(RLIMIT_NOFILE, &usual);
  EXPECT_THAT(get(client, "/metrics"), HasSubstr("200 OK"));
}

TEST_F(ObservedWorker, DescribesWhatItDoes) {
  const TemporaryFolder folder;
  const auto observation = observe({.socket_folder = folder.path});
  const SpanScope scope(runtime_->spans, SpanKind::kWait, "wait for reduction", {.id = 17});
  const TimePoint now = executor_->now();
  runtime_->spans.record(SpanKind::kCall, "f", now, SpanLink{.peer = 0, .bytes = 1000});
  runtime_->spans.record(SpanKind::kHandler, "g", now, SpanLink{.peer = 0, .bytes = 24});
  runtime_->spans.record(SpanKind::kCollective, "barrier", now, SpanLink{.peer = 0, .bytes = 7});
  const std::string answer = get(dial(folder.path + "/observe.1"), "/state");
  const auto state = nlohmann::json::parse(answer.substr(answer.find("\r\n\r\n") + 4));
  EXPECT_EQ(state["worker"], "worker1");
  EXPECT_EQ(state["rank"], 1);
  EXPECT_EQ(state["process"], getpid());
  EXPECT_EQ(state["open"].size(), 1u);
  EXPECT_EQ(state["open"][0]["name"], "wait for reduction");
  EXPECT_EQ(state["open"][0]["id"], 17);
  EXPECT_TRUE(state["calls"]["pending"].is_array());
  EXPECT_GE(state["threads"].size(), 2u);
  ASSERT_EQ(state["traffic"].size(), 1u);
  EXPECT_EQ(state["traffic"][0]["from"], 0);
  EXPECT_EQ(state["traffic"][0]["bytes"], 1024);
  struct stat about {};
  ASSERT_EQ(stat((folder.path + "/observe.1").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0600u);
}

TEST_F(ObservedWorker, RemovesItsSocket) {
  const TemporaryFolder folder;
  observe({.socket_folder = folder.path}).reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path));
}

TEST_F(ObservedWorker, NamesAPortInUse) {
  const auto first = observe({.metrics_port = 0});
  try {
    observe({.metrics_port = first->metrics_port()});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.message(), HasSubstr(std::to_string(first->metrics_port())));
  }
}

TEST_F(ObservedWorker, GoesOnWithTheCurveOfTheWorkerThatItReplaces) {
  const TemporaryFolder folder;
  const std::string path = folder.path + "/worker1.0.jsonl";
  std::ofstream(path) << "{\"value\":0.5}";  // it was killed before the end of the line
  {
    const auto observation = observe({.scalars_folder = folder.path});
    runtime_->scalars.add("loss", 0.25, 300, executor_->now());
  }
  std::istringstream lines(file_text(path));
  std::vector<double> losses;
  for (std::string line; std::getline(lines, line);) losses.push_back(nlohmann::json::parse(line)["value"]);
  EXPECT_THAT(losses, ::testing::ElementsAre(0.5, 0.25));
}

TEST_F(ObservedWorker, WritesScalarsForTensorBoardAndAsLines) {
  const TemporaryFolder folder;
  {
    const auto observation =
        observe({.tensorboard_folder = folder.path + "/tb", .scalars_folder = folder.path + "/lines"});
    runtime_->scalars.add("loss", 0.25, 300, executor_->now());
    runtime_->scalars.add("loss", std::numeric_limits<double>::quiet_NaN(), std::nullopt, executor_->now());
  }
  std::istringstream lines(file_text(folder.path + "/lines/worker1.0.jsonl"));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(nlohmann::json::parse(line)["value"], 0.25);
  std::getline(lines, line);
  EXPECT_EQ(nlohmann::json::parse(line)["value"], "nan");
  EXPECT_EQ(nlohmann::json::parse(line)["step"], 301);
  const auto entry = *std::filesystem::directory_iterator(folder.path + "/tb/worker1");
  EXPECT_TRUE(entry.path().filename().string().starts_with("events.out.tfevents."));
  const std::string events = file_text(entry.path());
  EXPECT_NE(events.find("brain.Event:2"), std::string::npos);
  EXPECT_NE(events.find(std::string("\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x80\x3e", 15)),
            std::string::npos)
      << "summary { value { tag: loss, simple_value: 0.25 } }";
}

TEST(EventRecord, HasTheLengthAndMaskedChecksums) {
  // A record of TensorFlow's tests: the data "foo".
  const Bytes record = encode_event_record(std::as_bytes(std::span("foo", 3)));
  ASSERT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(static_cast<int>(record[0]), 3);
  EXPECT_EQ(std::memcmp(record.data() + 12, "foo", 3), 0);
}

TEST(ObservationOptions, ComeFromTheEnvironment) {
  const auto options = ObservationOptions::from({{"TORCHSPAN_TRACE", "/t"},
                                                 {"TORCHSPAN_METRICS_PORT", "9000"},
                                                 {"LOCAL_RANK", "3"},
                                                 {"TORCHSPAN_TRACE_SPANS", "5"}});
  EXPECT_EQ(options.trace_folder, "/t");
  EXPECT_EQ(options.metrics_port, 9003);
  EXPECT_EQ(options.most_trace_spans, 5u);
  EXPECT_FALSE(ObservationOptions::from({}).metrics_port);
  EXPECT_EQ(ObservationOptions::from({{"TORCHSPAN_METRICS_PORT", "0"}, {"LOCAL_RANK", "3"}}).metrics_port, 0);
  for (const char* wrong : {"x", "-1", "65536", "65535"}) {
    EXPECT_THROW(ObservationOptions::from({{"TORCHSPAN_METRICS_PORT", wrong}, {"LOCAL_RANK", "1"}}), Error)
        << wrong;
  }
}

}  // namespace
}  // namespace torchspan::observation_test
