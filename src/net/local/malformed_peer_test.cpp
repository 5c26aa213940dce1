#include "net/local/local_test_tools.h"

/// A peer that knows the secret and lies in every place where it can.
namespace torchspan::net::local_test::malformed_peer_test {
namespace {

using ::testing::HasSubstr;

TEST_F(LocalTransportTest, UsesTheSocketWithAPeerThatDeclinesSharedMemory) {
  const RawPeer peer = dial_raw(Verdict::kNo);
  const Bytes header(10, std::byte{3});
  peer.say(FramePrefix(header, {}).bytes());
  peer.say(header);
  drive_until([&] { return !listener_->journal.received.empty(); });
  EXPECT_EQ(listener_->journal.received.at(0).header, header);
}

TEST_F(LocalTransportTest, RejectsAPeerThatCannotReadTheRing) {
  const RawPeer peer = dial_raw(Verdict::kYesWithoutNonce);
  ASSERT_FALSE(listener_->journal.refused.empty());
  EXPECT_EQ(listener_->journal.refused.at(0).kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, RejectsAPeerThatSettlesInAnotherProtocol) {
  const RawPeer peer = dial_authenticated();
  peer.say(Bytes(48, std::byte{0x7f}));
  drive_until([&] { return !listener_->journal.refused.empty(); });
  EXPECT_EQ(listener_->journal.refused.at(0).kind(), ErrorKind::kInvalid);
  EXPECT_TRUE(listener_->journal.accepted.empty());
}

TEST_F(LocalTransportTest, CutsOffAPeerWhoseCountersAreImpossible) {
  {
    RawPeer peer = dial_raw();
    peer.out->header().tail = kRing + 1;
    const Error error = end_of_raw();
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_THAT(error.message(), HasSubstr("process " + std::to_string(getpid())));
  }
  RawPeer peer = dial_raw();
  peer.in->header().head = 1;
  EXPECT_THROW(send(*channel_, kRing, 1), Error);
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatBreaksTheFramingInTheRing) {
  RawPeer peer = dial_raw();
  peer.write(Bytes(kPrefixBytes, std::byte{0x7f}));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatSendsInvalidNotesOnTheSocket) {
  const RawPeer peer = dial_raw();
  peer.say(Bytes(10, std::byte{0x7f}));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatLendsABlockThatItNeverPassed) {
  RawPeer peer = dial_raw();
  peer.write(RawPeer::lending(5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatLendsABlockTwice) {
  RawPeer peer = dial_raw();
  const std::size_t size = kBlockHeaderBytes + 100'000;
  const auto made = make_memory({}, size);
  peer.say(RawPeer::note(ControlMessage::Kind::kBlock, 5, size), made->descriptor.get());
  peer.write(RawPeer::lending(5, 100'000));
  drive_until([&] { return listener_->journal.received.size() == 1; });
  peer.write(RawPeer::lending(5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatAnnouncesMemoryWithoutPassingIt) {
  const RawPeer peer = dial_raw();
  peer.say(RawPeer::note(ControlMessage::Kind::kBlock, 5, 100'000));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatRetiresAnUnknownBlock) {
  const RawPeer peer = dial_raw();
  peer.say(RawPeer::note(ControlMessage::Kind::kRetired, 5, 0));
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, CutsOffAPeerThatFloodsItWithDescriptors) {
  const RawPeer peer = dial_raw();
  const std::byte wake{1};
  for (int i = 0; i < 70; ++i) peer.say({&wake, 1}, peer.socket.get());
  EXPECT_EQ(end_of_raw().kind(), ErrorKind::kInvalid);
}

TEST_F(LocalTransportTest, DeliversCompleteMessagesOfADeadPeerAndReportsTheIncompleteOne) {
  {
    RawPeer peer = dial_raw();
    const Bytes header(100);
    peer.write(FramePrefix(header, {}).bytes());
    peer.write(header);
    peer.write(FramePrefix(header, {}).bytes());
  }
  const Error error = end_of_raw();
  EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
  EXPECT_THAT(error.message(), HasSubstr("in the middle of a message"));
  EXPECT_EQ(listener_->journal.received.size(), 1u);
}

TEST_F(LocalTransportTest, TakesAGoodbyeThroughTheRing) {
  RawPeer peer = dial_raw();
  peer.write(goodbye_frame());
  EXPECT_THAT(end_of_raw().message(), HasSubstr("closed the channel"));
}

}  // namespace
}  // namespace torchspan::net::local_test::malformed_peer_test
