#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <openssl/evp.h>
#include <optional>
#include <span>
#include <string>
#include <sys/uio.h>

#include "net/tls/aead.h"
#include "net/tls/byte_stream.h"
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
inline constexpr std::size_t kRecordTagBytes = kAeadTagBytes;
inline constexpr std::size_t kRecordOverhead = kRecordHeaderBytes + kRecordTagBytes;
inline constexpr std::uint32_t kLastUnderKey = std::uint32_t{1} << 31;

/// Encrypts or decrypts the records of one direction of a connection, one after another. Not thread-safe.
class RecordCipher {
 public:
  /// `secret`: from the TLS exporter, for this direction of this connection only; `algorithm`: an AEAD.
  RecordCipher(const EVP_CIPHER* algorithm, const KeySecret& secret, CipherUse use);
  RecordCipher(RecordCipher&&) = default;
  ~RecordCipher();

  /// Starts the next record, whose first bytes are `header`.
  void begin(const std::array<char, kRecordHeaderBytes>& header);
  void add(const char* from, char* to, std::size_t size) { aead_->add(from, to, size); }
  /// Ends an encrypted record.
  void finish(char* tag) { aead_->finish(tag); }
  /// Ends a decrypted record; false if it is not what the peer encrypted as its next record.
  [[nodiscard]] bool verify(const char* tag) { return aead_->verify(tag); }
  /// Uses the next key from the next record on. The old one cannot be derived from it.
  void renew_key();

 private:
  std::unique_ptr<Aead> aead_;
  KeySecret secret_;
  AeadNonce base_{};          ///< of the nonces under this key
  std::uint64_t number_ = 0;  ///< of the next record under this key
};

/// Decrypts records into the memory of the caller: pure and incremental. Not thread-safe. After a throw, it
/// must not be used again, and bytes of earlier calls are the last valid ones.
class RecordReader {
 public:
  /// `ahead`: bytes of the first records that have arrived; errors name `peer`.
  RecordReader(RecordCipher cipher, std::string peer, std::span<const char> ahead);

  /// Where to receive the next bytes; not empty. Grows, up to a limit, while the caller fills all of it.
  std::span<char> room();
  /// The caller received `size` bytes into room().
  void received(std::size_t size);
  /// Decrypts complete records into `places`; returns how many bytes. Keeps what does not fit for the next
  /// call. Throws kInvalid for bytes that the peer did not encrypt as its next record.
  std::size_t read(PlaceCursor& places);

 private:
  /// The size of the next record if it has arrived, with its flag.
  std::optional<std::uint32_t> next_record() const;
  std::size_t take_rest(PlaceCursor& places);
  std::size_t open(std::uint32_t header, PlaceCursor& places);
  [[noreturn]] void throw_invalid() const;

  RecordCipher cipher_;
  const std::string peer_;
  std::unique_ptr<char[]> in_;
  std::size_t room_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  bool filled_ = false;           ///< the last received() filled all of room()
  std::unique_ptr<char[]> rest_;  ///< decrypted bytes that did not fit
  std::size_t rest_begin_ = 0;
  std::size_t rest_end_ = 0;
};

/// Encrypts bytes into records and holds those that are not sent yet: pure. Not thread-safe.
class RecordWriter {
 public:
  /// Bytes that one write() encrypts, about: they stay in the processor's cache until they are sent.
  static constexpr std::size_t kBatch = 4 * kRecordBytes;

  /// `unsent`: what must be sent before the first record. Changes the key after `bytes_per_key`.
  RecordWriter(RecordCipher cipher, std::uint64_t bytes_per_key, std::span<const char> unsent);

  /// Encrypts the first bytes of `places` and returns how many; 0 while a batch waits to be sent.
  std::size_t write(std::span<const iovec> places);
  /// What waits to be sent. sent() drops the first bytes of it.
  std::span<const char> waiting() const { return {out_.get() + begin_, end_ - begin_}; }
  void sent(std::size_t size);
  std::uint64_t key_renewals() const { return key_renewals_; }

 private:
  void make_room(std::size_t size);
  void seal(PlaceCursor& places, std::size_t size);

  RecordCipher cipher_;
  const std::uint64_t bytes_per_key_;
  std::unique_ptr<char[]> out_;
  std::size_t room_ = 0;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::uint64_t under_this_key_ = 0;
  std::uint64_t key_renewals_ = 0;
};

}  // namespace torchspan::net
