#include "collective/channels/messages.h"

#include <gtest/gtest.h>

#include "tests/support/errors.h"

namespace torchspan::collective::channels::messages_test {
namespace {

using torchspan::testing::error_of;

TEST(ChannelMessages, SurviveTheWire) {
  const GroupMessage hello = decode(encode(Hello{0x0123456789ABCDEFULL, 7}));
  EXPECT_EQ(std::get<Hello>(hello).nonce, 0x0123456789ABCDEFULL);
  EXPECT_EQ(std::get<Hello>(hello).rank, 7U);
  const GroupMessage part = decode(encode(Part{1ULL << 40, 9, 3}));
  EXPECT_EQ(std::get<Part>(part).operation, 1ULL << 40);
  EXPECT_EQ(std::get<Part>(part).part, 9U);
  EXPECT_EQ(std::get<Part>(part).calls, 3U);
  const GroupMessage abort = decode(encode(Abort{ErrorKind::kTimedOut, 7, "late"}));
  EXPECT_EQ(std::get<Abort>(abort).kind, ErrorKind::kTimedOut);
  EXPECT_EQ(std::get<Abort>(abort).from_call, 7U);
  EXPECT_EQ(std::get<Abort>(abort).text, "late");
  EXPECT_EQ(std::get<End>(decode(encode(End{"bye"}))).text, "bye");
  const GroupMessage offer = decode(encode(Offer{1ULL << 41, 1U << 31, "Float [3]"}));
  EXPECT_EQ(std::get<Offer>(offer).number, 1ULL << 41);
  EXPECT_EQ(std::get<Offer>(offer).tag, 1U << 31);
  EXPECT_EQ(std::get<Offer>(offer).text, "Float [3]");
  EXPECT_EQ(std::get<Accept>(decode(encode(Accept{11}))).number, 11U);
  EXPECT_EQ(std::get<Data>(decode(encode(Data{12}))).number, 12U);
  EXPECT_EQ(std::get<Done>(decode(encode(Done{13}))).number, 13U);
}

TEST(ChannelMessages, TruncateTextsThatNoHeaderCanHold) {
  const GroupMessage note = decode(encode(Abort{ErrorKind::kInvalid, 0, std::string(1 << 20, 'x')}));
  EXPECT_EQ(std::get<Abort>(note).text.size(), std::size_t{32} << 10);
}

TEST(ChannelMessages, RejectEveryOtherEncoding) {
  for (const GroupMessage& note : {GroupMessage(Hello{1, 2}), GroupMessage(Part{1, 2, 3}),
                                   GroupMessage(Abort{ErrorKind::kInvalid, 1, "text"}),
                                   GroupMessage(End{"text"}), GroupMessage(Offer{1, 2, "text"}),
                                   GroupMessage(Accept{1}), GroupMessage(Data{1}), GroupMessage(Done{1})}) {
    const Bytes whole = encode(note);
    for (std::size_t size = 0; size < whole.size(); ++size) {
      EXPECT_EQ(error_of([&] { decode(BytesView(whole).first(size)); }).kind(), ErrorKind::kInvalid) << size;
    }
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    EXPECT_EQ(error_of([&] { decode(longer); }).kind(), ErrorKind::kInvalid);
  }
  for (const int type : {0, 9, 255}) {
    EXPECT_EQ(error_of([&] { decode(Bytes(20, static_cast<std::byte>(type))); }).kind(), ErrorKind::kInvalid);
  }
  for (const int kind : {0, 9, 255}) {
    Bytes abort = encode(Abort{ErrorKind::kInvalid, 0, ""});
    abort[1] = static_cast<std::byte>(kind);
    EXPECT_EQ(error_of([&] { decode(abort); }).kind(), ErrorKind::kInvalid) << kind;
  }
}

}  // namespace
}  // namespace torchspan::collective::channels::messages_test
