#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "net/tls/place_cursor.h"
#include "net/tls/record_cipher.h"

namespace torchspan::net {

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

}  // namespace torchspan::net
