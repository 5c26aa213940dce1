#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <openssl/evp.h>

#include "net/tls/key_derivation.h"
#include "net/tls/tls_context.h"

namespace torchspan::net {

/// The layout of the bytes of a connection after its TLS handshake and greetings. Integers are little-endian:
///
///   record   u32 size  u8 ciphertext[size]  u8 tag[16]
///
/// `size` is 1 to kMostRecordBytes; kLastUnderKey is set in the last record before the sender's next key. The
/// algorithm is the one that TLS negotiated. The nonce is the number of the record under its key, XORed with
/// derived bytes (as in RFC 8446, 5.3); the first four bytes are authenticated, too.
inline constexpr std::size_t kRecordBytes = 64 << 10;
/// A record has kRecordBytes, unless the rest of what is being sent fits, too.
inline constexpr std::size_t kMostRecordBytes = 80 << 10;
inline constexpr std::size_t kRecordHeaderBytes = 4;
inline constexpr std::size_t kRecordTagBytes = 16;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + kRecordTagBytes;
inline constexpr std::uint32_t kLastUnderKey = std::uint32_t{1} << 31;

enum class CipherUse : std::uint8_t { kEncrypt, kDecrypt };

/// Encrypts or decrypts the records of one direction of a connection, one after another. Not thread-safe.
class RecordCipher {
 public:
  /// `secret`: from the TLS exporter, for this direction of this connection only; `algorithm`: an AEAD.
  RecordCipher(const EVP_CIPHER* algorithm, const KeySecret& secret, CipherUse use);
  RecordCipher(RecordCipher&&) = default;
  ~RecordCipher();

  /// Starts the next record, whose first bytes are `header`.
  void begin(const std::array<char, kRecordHeaderBytes>& header);
  void add(const char* from, char* to, std::size_t size);
  /// Ends an encrypted record.
  void finish(char* tag);
  /// Ends a decrypted record; false if it is not what the peer encrypted as its next record.
  [[nodiscard]] bool verify(const char* tag);
  /// Uses the next key from the next record on. The old one cannot be derived from it.
  void renew_key();

 private:
  static constexpr std::size_t kNonceBytesOfRecord = 12;
  [[noreturn]] static void fail();

  const EVP_CIPHER* algorithm_;
  const CipherUse use_;
  KeySecret secret_;
  std::array<unsigned char, kNonceBytesOfRecord> base_{};  ///< of the nonces under this key
  std::uint64_t number_ = 0;                               ///< of the next record under this key
  std::unique_ptr<EVP_CIPHER_CTX, Release<EVP_CIPHER_CTX_free>> context_;
};

}  // namespace torchspan::net
