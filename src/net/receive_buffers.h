#pragma once
#include <memory>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// Where a transport receives large segments: an allocator that keeps memory when its user lets go of it, for
/// memory that was touched before is received into faster than what the system hands out anew. Copies share
/// what is kept; it is freed with the last of them, and what is still out by its users. For any thread.
class ReceiveBuffers {
 public:
  struct Limits {
    std::size_t from = std::size_t{1} << 20;      ///< smaller segments are left to allocate_buffer()
    std::uint64_t keep = std::uint64_t{1} << 30;  ///< bytes that wait for their next use, at most
    Duration idle = std::chrono::seconds(1);      ///< unused for this long, and twice at most: freed
  };
  ReceiveBuffers() : ReceiveBuffers(Limits{}) {}
  explicit ReceiveBuffers(Limits limits);

  /// As allocate_buffer(), in kept memory if some fits: at most a quarter of it goes unused.
  Buffer operator()(std::size_t size) const;
  /// To be called before a sleep: frees what has waited for long, and says when to be called next; never when
  /// nothing is kept or may come back.
  Deadline tidy(TimePoint now) const;
  std::uint64_t kept_bytes() const;

  /// The ones that `options` receive with, or null.
  static const ReceiveBuffers* of(const TransportOptions& options);

 private:
  struct Store;
  struct Share;
  std::shared_ptr<const Share> share_;
};

/// `options` with ReceiveBuffers in the place of allocate_buffer(); any other allocator stays.
TransportOptions with_receive_buffers(TransportOptions options);
/// Whether the options name an allocator other than allocate_buffer() and ReceiveBuffers.
bool has_own_allocator(const TransportOptions& options);

}  // namespace torchspan::net
