#pragma once
#include <memory>

#include <torchspan/core/time.h>
#include <torchspan/detail/core/buffer.h>
#include <torchspan/detail/net/transport.h>

namespace torchspan::net {

/// Allocator for large received segments. Keeps memory that its user released, because receiving into memory
/// that was used before is faster than into fresh pages. Copies share the kept memory; the last copy frees
/// it, and users free what they still hold. Thread-safe.
class ReceiveBuffers {
 public:
  struct Limits {
    std::size_t from = std::size_t{1} << 20;      ///< smaller segments are left to allocate_buffer()
    std::uint64_t keep = std::uint64_t{1} << 30;  ///< most bytes kept for their next use
    Duration idle = std::chrono::seconds(1);      ///< frees memory unused for this long, or up to twice
  };
  ReceiveBuffers() : ReceiveBuffers(Limits{}) {}
  explicit ReceiveBuffers(Limits limits);

  /// Like allocate_buffer(), in kept memory if some fits with at most a quarter unused.
  Buffer operator()(std::size_t size) const;
  /// Frees memory that is unused for long; call it before a sleep. Returns when to call it next; never if no
  /// memory is kept or in use.
  Deadline tidy(TimePoint now) const;
  std::uint64_t kept_bytes() const;

  /// The ReceiveBuffers of `options`, or null.
  static const ReceiveBuffers* of(const TransportOptions& options);

 private:
  struct Store;
  struct Share;
  std::shared_ptr<const Share> share_;
};

/// Replaces allocate_buffer() in `options` with ReceiveBuffers; keeps any other allocator.
TransportOptions with_receive_buffers(TransportOptions options);
/// Whether the options name an allocator other than allocate_buffer() and ReceiveBuffers.
bool has_own_allocator(const TransportOptions& options);

}  // namespace torchspan::net
