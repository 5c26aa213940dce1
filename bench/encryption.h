#pragma once
#include <algorithm>
#include <cstring>
#include <span>

#include <torchspan/detail/core/buffer.h>

#include "net/tls/record_cipher.h"

namespace torchspan::bench {

/// Encrypts and decrypts as the two ends of a connection do, without a connection: the limit of what TLS can
/// reach on one core.
class Encryption {
 public:
  explicit Encryption(std::size_t bytes)
      : writer_(cipher(net::CipherUse::kEncrypt), ~std::uint64_t{0}, {}),
        reader_(cipher(net::CipherUse::kDecrypt), "peer", {}),
        from_(allocate_buffer(bytes)),
        to_(allocate_buffer(bytes)) {
    std::memset(from_.data, 1, bytes);
    std::memset(to_.data, 2, bytes);
  }

  void once() {
    for (std::size_t at = 0, got = 0; at < from_.size;) {
      const iovec plain{from_.data + at, from_.size - at}, back{to_.data + got, to_.size - got};
      at += writer_.write(std::span(&plain, 1));
      net::PlaceCursor cursor(std::span(&back, 1));
      while (!writer_.waiting().empty()) {
        const std::span<char> room = reader_.room();
        const std::size_t size = std::min(room.size(), writer_.waiting().size());
        std::memcpy(room.data(), writer_.waiting().data(), size);
        writer_.sent(size);
        reader_.received(size);
        got += reader_.read(cursor);
      }
    }
  }

 private:
  static net::RecordCipher cipher(net::CipherUse use) { return {EVP_aes_128_gcm(), net::KeySecret{}, use}; }

  net::RecordWriter writer_;
  net::RecordReader reader_;
  Buffer from_, to_;
};

}  // namespace torchspan::bench
