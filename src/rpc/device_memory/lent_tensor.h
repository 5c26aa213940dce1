#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>
#include <torchspan/detail/core/mutex.h>

#include "rpc/device_memory/messages.h"

namespace torchspan::rpc {

/// A part of a LentArea.
struct Lease {
  std::uint64_t id = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

/// Memory on a device that one peer maps, and which parts of it messages use. A part is free again when its
/// message was not sent, or when the peer has returned it. Thread-safe.
class LentArea {
 public:
  LentArea(std::shared_ptr<std::byte> memory, std::size_t bytes)
      : memory_(std::move(memory)), bytes_(bytes) {}

  std::byte* data() const { return memory_.get(); }
  std::size_t size() const { return bytes_; }
  /// Returns a part, aligned to 256 bytes; nullopt if no free part is large enough.
  std::optional<Lease> take(std::size_t bytes);
  /// Whether take() would return one now.
  bool has_room(std::size_t bytes) const;
  /// The message is about to be sent: from now on the peer may return the part.
  void lend(std::uint64_t lease) { set_lent(lease, true); }
  /// The message was not sent after all.
  void take_back(std::uint64_t lease) { set_lent(lease, false); }
  /// The message is gone here: frees the part unless the peer has it.
  void drop(std::uint64_t lease);
  /// Whether the part is in use.
  bool has(std::uint64_t lease) const;
  /// The peer returns a part; no effect if it has returned it before. Throws Error{kInvalid} for a part that it
  /// never got.
  void returned(std::uint64_t lease);
  /// How many parts are in use.
  std::size_t used() const;

 private:
  struct Part {
    std::uint64_t lease;
    std::size_t bytes;
    bool lent;
  };
  using Parts = std::map<std::size_t, Part>;  ///< by offset
  void set_lent(std::uint64_t lease, bool lent);
  std::optional<std::size_t> free_offset(std::size_t bytes) const TORCHSPAN_REQUIRES(mutex_);
  Parts::iterator find(std::uint64_t lease) TORCHSPAN_REQUIRES(mutex_);

  const std::shared_ptr<std::byte> memory_;
  const std::size_t bytes_;
  mutable Mutex mutex_;
  Parts parts_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t last_lease_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
};

/// The memory of one tensor of an outgoing message, or of a part of one. Its destructor frees the memory, unless the peer
/// has the message. The device must have done its copies then.
class LentTensor {
 public:
  LentTensor(std::shared_ptr<LentArea> area, Lease lease, std::uint32_t route)
      : area_(std::move(area)), lease_(lease), route_(route) {}
  ~LentTensor() { area_->drop(lease_.id); }
  LentTensor(const LentTensor&) = delete;
  LentTensor& operator=(const LentTensor&) = delete;

  /// The memory as a dense tensor of the sizes and dtype of `tensor`; does not own it.
  at::Tensor view_like(const at::Tensor& tensor) const;
  SharedPlace place(std::size_t segment) const {
    return {static_cast<std::uint32_t>(segment), route_, lease_.id, lease_.offset, lease_.bytes};
  }
  /// Call before the message is sent, and take_back() if the channel does not accept it.
  void lend() const { area_->lend(lease_.id); }
  void take_back() const { area_->take_back(lease_.id); }
  /// Whether the peer has not returned the memory.
  bool in_use() const { return area_->has(lease_.id); }
  std::size_t bytes() const { return lease_.bytes; }

 private:
  const std::shared_ptr<LentArea> area_;
  const Lease lease_;
  const std::uint32_t route_;
};
using LentTensorPtr = std::shared_ptr<const LentTensor>;

}  // namespace torchspan::rpc
