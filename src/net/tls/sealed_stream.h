#pragma once
#include <atomic>
#include <string>

#include <torchspan/detail/core/mutex.h>

#include "net/tls/byte_stream.h"
#include "net/tls/record_reader.h"
#include "net/tls/record_writer.h"

namespace torchspan::net {

/// Encrypted records over a socket, which another object owns. Reading and writing have separate locks, each
/// held for one batch.
class SealedStream final : public ByteStream {
 public:
  SealedStream(int socket, RecordReader reader, RecordWriter writer);

  Got read(std::span<const iovec> places) override;
  ssize_t write(std::span<const iovec> places) override;
  bool flush() override;
  std::size_t unsent() const override { return unsent_.load(std::memory_order_relaxed); }
  std::string broken() const override;
  std::uint64_t key_renewals() const override;

 private:
  bool flush_locked() TORCHSPAN_REQUIRES(writing_);

  const int socket_;
  Mutex reading_;
  RecordReader reader_ TORCHSPAN_GUARDED_BY(reading_);
  mutable Mutex writing_;
  RecordWriter writer_ TORCHSPAN_GUARDED_BY(writing_);
  std::string broken_ TORCHSPAN_GUARDED_BY(writing_);
  std::atomic<std::size_t> unsent_;
};

}  // namespace torchspan::net
