#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "net/tls/record_cipher.h"
#include "tests/support/fuzz_seeds.h"

namespace {

using namespace torchspan;
using namespace torchspan::net;

constexpr char kText = 'p';

KeySecret secret() {
  KeySecret secret;
  secret.fill('k');
  return secret;
}

/// Records of kText in the given sizes.
Bytes records(std::initializer_list<std::size_t> sizes, std::uint64_t bytes_per_key) {
  RecordWriter writer(RecordCipher(EVP_aes_128_gcm(), secret(), CipherUse::kEncrypt), bytes_per_key, {});
  Bytes all;
  for (const std::size_t size : sizes) {
    std::vector<char> text(size, kText);
    const iovec place{text.data(), text.size()};
    writer.write(std::span(&place, 1));
    const auto waiting = std::as_bytes(writer.waiting());
    all.insert(all.end(), waiting.begin(), waiting.end());
    writer.sent(waiting.size());
  }
  return all;
}

}  // namespace

/// Bytes of a peer that does not know the keys: whatever they are, only text of the key's owner is read.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const std::size_t piece = 1 + 64 * static_cast<std::size_t>(data[0]);
  std::vector<char> memory(1 + 256 * static_cast<std::size_t>(data[1]));
  BytesView bytes = std::as_bytes(std::span(data + 2, size - 2));
  try {
    RecordReader reader(RecordCipher(EVP_aes_128_gcm(), secret(), CipherUse::kDecrypt), "peer", {});
    while (!bytes.empty()) {
      const std::span<char> room = reader.room();
      if (room.empty()) std::abort();
      const std::size_t taken = std::min({room.size(), piece, bytes.size()});
      std::memcpy(room.data(), bytes.data(), taken);
      reader.received(taken);
      bytes = bytes.subspan(taken);
      std::size_t got;
      do {
        const iovec place{memory.data(), memory.size()};
        PlaceCursor cursor(std::span(&place, 1));
        got = reader.read(cursor);
        if (std::any_of(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(got),
                        [](char c) { return c != kText; })) {
          std::abort();
        }
      } while (got == memory.size());
    }
  } catch (const Error&) {
  }
  return 0;
}

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  return torchspan::testing::offer_seeds(count, arguments, [] {
    using torchspan::testing::bytes_of, torchspan::testing::joined;
    std::vector<Bytes> seeds;
    for (const int lump : {0, 1, 255}) {
      for (const std::uint64_t bytes_per_key : {std::uint64_t{50}, std::uint64_t{1} << 30}) {
        seeds.push_back(joined({bytes_of({lump, lump}), records({1, 100, 3000, 20}, bytes_per_key)}));
      }
    }
    seeds.push_back(joined({bytes_of({255, 255}), records({100'000}, std::uint64_t{1} << 30)}));
    return seeds;
  });
}
