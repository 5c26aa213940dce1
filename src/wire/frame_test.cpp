#include <gtest/gtest.h>
#include <random>
#include <string>

#include <torch/torch.h>

#include <torchspan/detail/wire/frame.h>
#include <torchspan/wire.h>

#include "wire/wire_test_util.h"

namespace torchspan::wire::frame_test {
namespace {

Bytes random_bytes(std::mt19937_64& random, std::size_t limit) {
  Bytes bytes(random() % limit);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

Frame random_frame(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Frame frame;
  frame.header.type = static_cast<MessageType>(random());
  frame.header.flags = static_cast<std::uint32_t>(random()) & ~std::uint32_t{kFlagHasBlobs};
  frame.header.instance = random();
  frame.header.sequence = random();
  frame.header.call = random();
  frame.header.remaining = static_cast<std::int64_t>(random());
  for (std::size_t n = random() % 4; n > 0; --n) {
    frame.blobs.push_back(
        {std::string(random() % 256, static_cast<char>(random())), random_bytes(random, 40)});
  }
  for (std::size_t n = random() % 4; n > 0; --n) {
    frame.handles.push_back({static_cast<std::uint32_t>(random()),
                             {static_cast<std::uint32_t>(random()), random()},
                             {static_cast<std::uint32_t>(random()), random()},
                             random()});
  }
  frame.value = random_bytes(random, 100);
  frame.tensor_metadata = random_bytes(random, 100);
  return frame;
}

Bytes copy_of(BytesView view) { return Bytes(view.begin(), view.end()); }

void expect_same(const FrameView& view, const Frame& frame) {
  FrameHeader header = frame.header;
  if (!frame.blobs.empty()) header.flags |= kFlagHasBlobs;
  EXPECT_EQ(view.header, header);
  ASSERT_EQ(view.blobs.size(), frame.blobs.size());
  for (std::size_t i = 0; i < frame.blobs.size(); ++i) {
    EXPECT_EQ(view.blobs[i].name, frame.blobs[i].name);
    EXPECT_EQ(copy_of(view.blobs[i].bytes), frame.blobs[i].bytes);
  }
  EXPECT_EQ(view.handles, frame.handles);
  EXPECT_EQ(copy_of(view.value), frame.value);
  EXPECT_EQ(copy_of(view.tensor_metadata), frame.tensor_metadata);
}

TEST(Frames, KeepAllTheirParts) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Frame frame = random_frame(seed);
    const Bytes bytes = encode_frame(frame);
    expect_same(decode_frame(bytes), frame);
  }
}

TEST(Frames, WithoutContentAreTheirHeader) { EXPECT_EQ(encode_frame({}).size(), kFrameHeaderSize); }

TEST(Frames, AreViewedAndNotCopied) {
  Frame frame;
  frame.value = Bytes(100, std::byte{7});
  const Bytes bytes = encode_frame(frame);
  EXPECT_EQ(decode_frame(bytes).value.data(), bytes.data() + kFrameHeaderSize);
}

TEST(Frames, FindBlobsByName) {
  Frame frame;
  frame.blobs = {{"autograd", Bytes(3)}, {"trace", Bytes(4)}};
  const Bytes bytes = encode_frame(frame);
  const FrameView view = decode_frame(bytes);
  ASSERT_NE(view.blob("trace"), nullptr);
  EXPECT_EQ(view.blob("trace")->bytes.size(), 4u);
  EXPECT_EQ(view.blob("trac"), nullptr);
}

TEST(Frames, OfAnotherVersionAreUnsupportedAndNameBoth) {
  Frame frame;
  frame.header.version = 7;
  const Bytes bytes = encode_frame(frame);
  try {
    decode_frame(bytes);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_NE(error.message().find("version 7"), std::string::npos);
    EXPECT_NE(error.message().find("version " + std::to_string(kWireProtocol.newest)), std::string::npos);
  }
}

TEST(Frames, OfEveryVersionThatTheReaderSpeaksAreRead) {
  Frame frame;
  for (const std::uint16_t version : {1, 2, 3, 4}) {
    frame.header.version = version;
    frame.header.features = 0b01;
    const Bytes bytes = encode_frame(frame);
    const ProtocolRange spoken{2, 3, 0b11};
    if (spoken.speaks(version)) {
      EXPECT_EQ(decode_frame(bytes, spoken).header.version, version);
      EXPECT_EQ(kind_of([&] { decode_frame(bytes, {2, 3, 0b10}); }), ErrorKind::kUnsupported);
    } else {
      EXPECT_EQ(kind_of([&] { decode_frame(bytes, spoken); }), ErrorKind::kUnsupported);
    }
  }
}

TEST(Frames, WithUnknownFeaturesAreUnsupportedAndWithUnknownFlagsAreRead) {
  Frame frame;
  frame.header.features = 1u << 31;
  const Bytes featured = encode_frame(frame);
  EXPECT_EQ(kind_of([&] { decode_frame(featured); }), ErrorKind::kUnsupported);
  frame.header.features = 0;
  frame.header.flags = 1u << 31;
  const Bytes flagged = encode_frame(frame);
  EXPECT_EQ(decode_frame(flagged).header.flags, 1u << 31);
}

TEST(Frames, OfForeignBytesAreRefused) {
  Bytes bytes = encode_frame({});
  bytes[0] = std::byte{'X'};
  EXPECT_EQ(kind_of([&] { decode_frame(bytes); }), ErrorKind::kInvalid);
  EXPECT_EQ(kind_of([] { decode_frame({}); }), ErrorKind::kInvalid);
}

TEST(Frames, ThatAnnounceMoreThanFollowsAreRefused) {
  for (const std::size_t offset : {56u, 60u}) {  // the size of the value, the number of handles
    ByteWriter writer(encode_frame(random_frame(3)));
    writer.patch(offset, std::uint32_t{0xFFFFFFFF});
    EXPECT_EQ(kind_of([&] { decode_frame(writer.bytes()); }), ErrorKind::kInvalid);
  }
}

TEST(Frames, WithANameThatIsTooLongAreNotEncoded) {
  Frame frame;
  frame.blobs = {{std::string(256, 'n'), {}}};
  EXPECT_EQ(kind_of([&] { encode_frame(frame); }), ErrorKind::kInvalid);
}

TEST(Frames, DamagedOnesAreViewsOfTheirBytesOrAnError) {
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    refused += damage(encode_frame(random_frame(seed)), seed, 300, [](const Bytes& bytes) {
      const FrameView view = decode_frame(bytes);
      std::size_t size =
          kFrameHeaderSize + view.handles.size() * 40 + view.value.size() + view.tensor_metadata.size();
      if ((view.header.flags & kFlagHasBlobs) != 0) size += 2;
      for (const NamedBlobView& blob : view.blobs) size += 5 + blob.name.size() + blob.bytes.size();
      EXPECT_EQ(size, bytes.size());
    });
  }
  EXPECT_GT(refused, 5000);
}

std::string to_hex(BytesView bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    if (i > 0) text += i % 16 == 0 ? '\n' : ' ';
    text += kDigits[static_cast<unsigned>(bytes[i]) >> 4];
    text += kDigits[static_cast<unsigned>(bytes[i]) & 15];
  }
  return text;
}

TEST(Frames, AreTheBytesOfTheWorkedExampleInTheDocumentation) {
  Payload payload = to_payload(std::string("add"), torch::tensor({{1.0f, 2.0f}}).requires_grad_(), 7L);
  Frame frame;
  frame.header.type = static_cast<MessageType>(1);
  frame.header.flags = kFlagHasDeadline;
  frame.header.instance = 0x1122334455667788;
  frame.header.sequence = 9;
  frame.header.call = 5;
  frame.header.remaining = 1'000'000'000;
  frame.blobs = {{"trace", Bytes{std::byte{0xAB}}}};
  frame.handles = {{1, {0, 3}, {0, 4}, type_tag<std::int64_t>()}};
  frame.value = std::move(payload.value);
  frame.tensor_metadata = pack(payload.tensors).metadata;
  EXPECT_EQ(to_hex(encode_frame(frame)),
            "54 53 50 4e 01 00 01 00 28 00 00 00 00 00 00 00\n"
            "88 77 66 55 44 33 22 11 09 00 00 00 00 00 00 00\n"
            "05 00 00 00 00 00 00 00 00 ca 9a 3b 00 00 00 00\n"
            "00 00 00 00 00 00 00 00 13 00 00 00 01 00 00 00\n"
            "01 00 05 74 72 61 63 65 01 00 00 00 ab 01 00 00\n"
            "00 00 00 00 00 03 00 00 00 00 00 00 00 00 00 00\n"
            "00 04 00 00 00 00 00 00 00 33 a5 e6 62 4b aa 1b\n"
            "d2 00 00 00 00 03 00 00 00 61 64 64 00 00 00 00\n"
            "07 00 00 00 00 00 00 00 01 00 00 00 01 01 06 00\n"
            "02 01 00 00 00 00 00 00 00 02 00 00 00 00 00 00\n"
            "00");
}

}  // namespace
}  // namespace torchspan::wire::frame_test
