#include <algorithm>
#include <cstring>
#include <gmock/gmock.h>
#include <numeric>
#include <optional>
#include <random>

#include "net/tls/aead.h"
#include "net/tls/record_cipher.h"
#include "tests/support/errors.h"

/// Encrypted records: what one side writes is what the other reads, or nothing.
namespace torchspan::net::records_test {
namespace {

using torchspan::testing::error_of;

constexpr std::uint64_t kManyBytes = std::uint64_t{1} << 40;

KeySecret secret_of(unsigned char letter) {
  KeySecret secret;
  secret.fill(letter);
  return secret;
}

RecordWriter writer(unsigned char letter = 's', std::uint64_t bytes_per_key = kManyBytes) {
  return {RecordCipher(EVP_aes_128_gcm(), secret_of(letter), CipherUse::kEncrypt), bytes_per_key, {}};
}

RecordReader reader(unsigned char letter = 's', const EVP_CIPHER* algorithm = EVP_aes_128_gcm()) {
  return {RecordCipher(algorithm, secret_of(letter), CipherUse::kDecrypt), "peer", {}};
}

std::string text_of(std::size_t size, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::string text(size, '\0');
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

/// The records of `text`, all of which one writer encrypts.
std::string encrypt(RecordWriter& from, std::string text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size();) {
    const iovec place{text.data() + at, text.size() - at};
    at += from.write(std::span(&place, 1));
    const std::span<const char> waiting = from.waiting();
    bytes.append(waiting.data(), waiting.size());
    from.sent(waiting.size());
  }
  return bytes;
}

/// Receives `bytes` in pieces of at most `piece` and returns what they decrypt to, into places of `place`.
std::string decrypt(RecordReader& to, std::string_view bytes, std::size_t piece,
                    std::size_t place = 1 << 20) {
  std::string text, memory(place, '\0');
  while (!bytes.empty()) {
    const std::span<char> room = to.room();
    const std::size_t size = std::min({room.size(), piece, bytes.size()});
    std::memcpy(room.data(), bytes.data(), size);
    to.received(size);
    bytes.remove_prefix(size);
    for (;;) {
      const iovec target{memory.data(), memory.size()};
      PlaceCursor cursor(std::span(&target, 1));
      const std::size_t got = to.read(cursor);
      text.append(memory.data(), got);
      if (got < memory.size()) break;
    }
  }
  return text;
}

TEST(RecordsTest, ArriveWholeForAllSizesOfMessagesPiecesAndPlaces) {
  const std::uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t limit) { return 1 + random() % limit; };
  for (const auto* algorithm : {EVP_aes_128_gcm(), EVP_chacha20_poly1305()}) {
    RecordWriter from(RecordCipher(algorithm, secret_of('s'), CipherUse::kEncrypt), 300'000, {});
    RecordReader to = reader('s', algorithm);
    for (const std::size_t most : {std::size_t{20}, std::size_t{5000}, std::size_t{1} << 20}) {
      for (int i = 0; i < 20; ++i) {
        const std::string text = text_of(below(most), random());
        const std::string bytes = encrypt(from, text);
        ASSERT_EQ(decrypt(to, bytes, below(bytes.size() + 100), below(text.size() + 100)), text);
      }
    }
    EXPECT_GE(from.key_renewals(), 5u);
  }
}

TEST(RecordsTest, HaveTheWrittenLayout) {
  RecordWriter from = writer();
  const std::string small = encrypt(from, "small"), large = encrypt(from, text_of(200'000, 1));
  EXPECT_EQ(small.size(), 5 + kRecordOverhead);
  std::vector<std::uint32_t> sizes;
  for (std::size_t at = 0; at < large.size(); at += sizes.back() + kRecordOverhead) {
    std::memcpy(&sizes.emplace_back(), large.data() + at, sizeof(std::uint32_t));
  }
  EXPECT_THAT(sizes, ::testing::ElementsAre(kRecordBytes, kRecordBytes, 200'000 - 2 * kRecordBytes));
  const std::string rest = encrypt(from, text_of(kMostRecordBytes, 1));
  EXPECT_EQ(rest.size(), kMostRecordBytes + kRecordOverhead) << "one record";
}

TEST(RecordsTest, AreNotReadIfAnyByteIsChanged) {
  RecordWriter from = writer();
  const std::string valid = encrypt(from, text_of(100, 1));
  for (std::size_t at = 0; at < valid.size(); ++at) {
    for (const int bit : {1, 0x80}) {
      std::string changed = valid, text;
      changed[at] = static_cast<char>(changed[at] ^ bit);
      RecordReader to = reader();
      try {
        // A record that claims to be larger has not arrived yet.
        text = decrypt(to, changed, 1 << 20);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
      }
      EXPECT_EQ(text, "") << "byte " << at << ", bit " << bit;
    }
  }
}

TEST(RecordsTest, AreRejectedTwiceInAnotherOrderAndWithAGap) {
  RecordWriter from = writer();
  const std::string first = encrypt(from, "first"), second = encrypt(from, "second");
  const auto rejects = [](const std::string& bytes) {
    RecordReader to = reader();
    return error_of([&] { decrypt(to, bytes, 1 << 20); }).kind() == ErrorKind::kInvalid;
  };
  EXPECT_TRUE(rejects(first + first));
  EXPECT_TRUE(rejects(second + first));
  EXPECT_TRUE(rejects(second));
  RecordReader to = reader();
  EXPECT_EQ(decrypt(to, first + second, 7), "firstsecond");
}

TEST(RecordsTest, AreRejectedFromAnotherConnectionOrDirection) {
  RecordWriter from = writer('s');
  const std::string bytes = encrypt(from, "text");
  RecordReader other = reader('t');
  EXPECT_EQ(error_of([&] { decrypt(other, bytes, 1 << 20); }).kind(), ErrorKind::kInvalid);
}

TEST(RecordsTest, LookDifferentEachTimeUnderEachKey) {
  // The nonce is never used twice: equal text gives unequal records, also across a change of the key.
  std::vector<std::string> all;
  for (const unsigned char letter : {'s', 't'}) {
    RecordWriter from = writer(letter, 1000);
    for (int i = 0; i < 50; ++i)
      all.push_back(encrypt(from, std::string(64, 'x')).substr(kRecordHeaderBytes));
    EXPECT_GE(from.key_renewals(), 2u);
  }
  std::ranges::sort(all);
  EXPECT_EQ(std::ranges::adjacent_find(all), all.end());
}

TEST(RecordsTest, AreRejectedEmptyAndTooLargeBeforeTheirBytesArrive) {
  for (const std::uint32_t size : {0u, static_cast<std::uint32_t>(kMostRecordBytes) + 1, 0x7fffffffu, ~0u}) {
    RecordReader to = reader();
    std::string header(sizeof size, '\0');
    std::memcpy(header.data(), &size, sizeof size);
    EXPECT_EQ(error_of([&] { decrypt(to, header, 4); }).kind(), ErrorKind::kInvalid) << size;
  }
}

TEST(RecordsTest, WaitWhileABatchIsUnsent) {
  RecordWriter from = writer();
  std::string text(3 * RecordWriter::kBatch, 'x');
  const iovec place{text.data(), text.size()};
  EXPECT_EQ(from.write(std::span(&place, 1)), RecordWriter::kBatch);
  EXPECT_EQ(from.write(std::span(&place, 1)), 0u);
  from.sent(100);
  EXPECT_EQ(from.write(std::span(&place, 1)), RecordWriter::kBatch) << "less than a batch of text waits";
}

/// One message by one implementation; the tag follows it.
std::string seal(Aead& aead, const std::string& text, std::mt19937& random) {
  std::string bytes(text.size() + kAeadTagBytes, '\0');
  aead.begin(AeadNonce{7}, std::string_view("head"));
  for (std::size_t at = 0, size = 0; at < text.size(); at += size) {
    size = std::min<std::size_t>(1 + random() % 100, text.size() - at);
    aead.add(text.data() + at, bytes.data() + at, size);
  }
  aead.finish(bytes.data() + text.size());
  return bytes;
}

std::optional<std::string> open(Aead& aead, const std::string& bytes, std::mt19937& random) {
  std::string text(bytes.size() - kAeadTagBytes, '\0');
  aead.begin(AeadNonce{7}, std::string_view("head"));
  for (std::size_t at = 0, size = 0; at < text.size(); at += size) {
    size = std::min<std::size_t>(1 + random() % 100, text.size() - at);
    aead.add(bytes.data() + at, text.data() + at, size);
  }
  if (!aead.verify(bytes.data() + text.size())) return std::nullopt;
  return text;
}

// Two hosts may have different libraries.
TEST(Aead, OfIpsecMbIsThatOfOpenssl) {
  std::mt19937 random(1);
  for (const auto* algorithm : {EVP_aes_128_gcm(), EVP_aes_256_gcm()}) {
    const auto ours = make_openssl_aead(algorithm, CipherUse::kEncrypt);
    const auto opener = make_openssl_aead(algorithm, CipherUse::kDecrypt);
    const auto theirs = make_ipsec_mb_aead(algorithm, CipherUse::kEncrypt);
    const auto their_opener = make_ipsec_mb_aead(algorithm, CipherUse::kDecrypt);
    if (!theirs)
      GTEST_SKIP() << "IPsec-MB was not there at build time, is not installed, or has no VAES to use";
    ASSERT_EQ(theirs->key_bytes(), ours->key_bytes());
    for (int round = 0; round < 200; ++round) {
      const std::string key = text_of(ours->key_bytes(), random());
      const std::span words(reinterpret_cast<const unsigned char*>(key.data()), key.size());
      for (Aead* aead : {ours.get(), opener.get(), theirs.get(), their_opener.get()}) aead->set_key(words);
      const std::string text = text_of(random() % 3000, random());
      std::string bytes = seal(*theirs, text, random);
      EXPECT_EQ(bytes, seal(*ours, text, random));
      EXPECT_EQ(open(*opener, bytes, random), text);
      EXPECT_EQ(open(*their_opener, bytes, random), text);
      bytes[random() % bytes.size()] ^= 1;
      EXPECT_EQ(open(*their_opener, bytes, random), std::nullopt);
    }
  }
}

TEST(Aead, OfIpsecMbIsForAesGcmOnly) {
  EXPECT_EQ(make_ipsec_mb_aead(EVP_chacha20_poly1305(), CipherUse::kEncrypt), nullptr);
}

}  // namespace
}  // namespace torchspan::net::records_test
