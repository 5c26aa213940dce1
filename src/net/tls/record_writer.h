#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <sys/uio.h>

#include "net/tls/place_cursor.h"
#include "net/tls/record_cipher.h"

namespace torchspan::net {

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
