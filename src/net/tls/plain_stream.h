#pragma once
#include <atomic>
#include <string>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "net/tls/byte_stream.h"

namespace torchspan::net {

/// Unencrypted, unauthenticated bytes over a socket, which another object owns: TcpNetwork::kIsolated. Bytes
/// go between the socket and the caller's memory without a copy in this process.
class PlainStream final : public ByteStream {
 public:
  /// `ahead`: bytes that have arrived already; `unsent`: bytes to send before all others.
  PlainStream(int socket, std::vector<char> ahead, std::vector<char> unsent);

  Got read(std::span<const iovec> places) override;
  ssize_t write(std::span<const iovec> places) override;
  bool flush() override;
  std::size_t unsent() const override { return waiting_.load(std::memory_order_relaxed); }
  std::string broken() const override;
  std::uint64_t key_renewals() const override { return 0; }

 private:
  ssize_t send(std::span<const iovec> places) TORCHSPAN_REQUIRES(mutex_);
  bool flush_locked() TORCHSPAN_REQUIRES(mutex_);

  const int socket_;
  std::vector<char> ahead_;  ///< for the reading thread
  mutable Mutex mutex_;
  std::vector<char> unsent_ TORCHSPAN_GUARDED_BY(mutex_);
  std::string broken_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<std::size_t> waiting_;
};

}  // namespace torchspan::net
