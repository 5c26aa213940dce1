#include <csignal>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string_view>

#include "launch/supervisor/node_rounds.h"

namespace torchspan::launch::node_state_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using Phase = NodeState::Phase;

Bytes bytes_of(std::string_view text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

NodeState failed(Duration ran, int code, int signal = 0) {
  NodeState state;
  state.attempt = 1;
  state.failure = NodeState::Failure{.result = {.ran = ran, .code = code, .signal = signal}, .text = "it"};
  return state;
}

TEST(NodeState, SurvivesItsEncoding) {
  NodeState state;
  state.attempt = 3;
  state.phase = Phase::kEnded;
  state.store_port = 65535;
  state.signal = SIGTERM;
  state.options = "-n 4 --max-restarts 3";
  auto decoded = decode_node_state(encode_node_state(state));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->attempt, 3);
  EXPECT_EQ(decoded->phase, Phase::kEnded);
  EXPECT_EQ(decoded->store_port, 65535);
  EXPECT_EQ(decoded->signal, SIGTERM);
  EXPECT_EQ(decoded->options, state.options);
  EXPECT_FALSE(decoded->failure);
  const AttemptResult result{
      .workers = 4, .started = 2, .ran = milliseconds(1500), .code = 7, .signal = SIGBUS};
  state.failure = NodeState::Failure{result, "worker\"1\" \xff"};
  decoded = decode_node_state(encode_node_state(state));
  ASSERT_TRUE(decoded && decoded->failure);
  const AttemptResult& there = decoded->failure->result;
  EXPECT_EQ(there.workers, 4);
  EXPECT_EQ(there.started, 2);
  EXPECT_EQ(there.ran, milliseconds(1500));
  EXPECT_EQ(there.code, 7);
  EXPECT_EQ(there.signal, SIGBUS);
  EXPECT_THAT(decoded->failure->text, HasSubstr("worker\"1\""));
}

TEST(NodeState, TextsOfOtherHostsHaveNoControlCharacters) {
  NodeState state = failed(seconds(1), 1);
  state.options = "-n\x1b[2J 4";
  state.failure->text =
      "worker1\x1b[2J exited\nwith\xc2\x9b"
      "2J code 1";
  const auto decoded = decode_node_state(encode_node_state(state));
  ASSERT_TRUE(decoded && decoded->failure);
  EXPECT_EQ(decoded->options, "-n [2J 4");
  EXPECT_EQ(decoded->failure->text, "worker1 [2J exited with 2J code 1");
}

TEST(NodeState, FitsIntoARoundWhateverItsTexts) {
  for (const char* piece : {"\x01", "ä", "\xff", "\""}) {
    NodeState state = failed(seconds(1), 1);
    for (int i = 0; i < 50000; ++i) state.failure->text += piece;
    state.options = state.failure->text;
    const Bytes bytes = encode_node_state(state);
    EXPECT_LT(bytes.size(), 60000u);
    EXPECT_TRUE(decode_node_state(bytes));
  }
}

TEST(NodeState, RejectsOtherBytes) {
  for (const char* text :
       {"", "{", "[]", "7", R"({"attempt": 0})",
        R"({"attempt":"0","phase":0,"store_port":0,"signal":0,"options":""})",
        R"({"attempt":0,"phase":3,"store_port":0,"signal":0,"options":""})",
        R"({"attempt":-1,"phase":0,"store_port":0,"signal":0,"options":""})",
        R"({"attempt":0,"phase":0,"store_port":65536,"signal":0,"options":""})",
        R"({"attempt":0,"phase":0,"store_port":0,"signal":18446744073709551615,"options":""})",
        R"({"attempt":0,"phase":0,"store_port":0,"signal":0,"options":7})",
        R"({"attempt":0,"phase":0,"store_port":0,"signal":0,"options":"","failure":{}})",
        R"({"attempt":0,"phase":0,"store_port":0,"signal":0,"options":"","failure":7})"}) {
    EXPECT_FALSE(decode_node_state(bytes_of(text))) << text;
  }
}

TEST(NodeState, AHostThatIsAheadOrBehindHasNotReachedThePhase) {
  NodeState mine, other;
  mine.attempt = other.attempt = 2;
  other.phase = Phase::kRunning;
  EXPECT_TRUE(all_reached({mine, other}, 2, Phase::kReady)) << "one starts a round earlier";
  EXPECT_FALSE(all_reached({mine, other}, 2, Phase::kRunning));
  EXPECT_FALSE(all_reached({mine, other}, 1, Phase::kReady));
  other.attempt = 1;
  other.phase = Phase::kEnded;
  EXPECT_FALSE(all_reached({mine, other}, 2, Phase::kReady));
  EXPECT_FALSE(all_reached({mine, other}, 1, Phase::kEnded));
}

TEST(NodeState, TheFirstFailureIsACrashOrTheEarliest) {
  NodeState good;
  good.attempt = 1;
  EXPECT_EQ(first_failed_node({good, good}, 1), std::nullopt);
  EXPECT_EQ(first_failed_node({good, failed(seconds(9), 1)}, 1), 1);
  EXPECT_EQ(first_failed_node({failed(seconds(9), 1), failed(seconds(8), 2)}, 1), 1);
  EXPECT_EQ(first_failed_node({failed(seconds(9), 1), failed(seconds(9), 2)}, 1), 0);
  EXPECT_EQ(first_failed_node({failed(seconds(9), 1), failed(seconds(10), 0, SIGKILL)}, 1), 1)
      << "the exit on host 0 may be its consequence";
  EXPECT_EQ(first_failed_node({failed(seconds(9), 1), failed(seconds(10), 0, SIGABRT)}, 1), 0);
  EXPECT_EQ(first_failed_node({failed(seconds(9), 1)}, 2), std::nullopt) << "of an earlier attempt";
}

TEST(NodeState, NamesTheHostWhoseOptionsDiffer) {
  NodeState one, two;
  one.options = two.options = "-n 4";
  EXPECT_EQ(describe_difference({one, two, one}), "");
  two.options = "-n 2";
  EXPECT_THAT(describe_difference({one, one, two}), HasSubstr("host 0 and host 2"));
  EXPECT_THAT(describe_difference({one, one, two}), HasSubstr("'-n 4' and '-n 2'"));
}

}  // namespace
}  // namespace torchspan::launch::node_state_test
