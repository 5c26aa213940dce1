#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "core/api/descriptor.h"
#include "net/local/local_share.h"

namespace torchspan::net {

/// The peer's blocks, mapped by the receiver. For the driver; the Buffers are for any thread.
class PeerBlocks {
 public:
  PeerBlocks(std::shared_ptr<LocalShare> share, const TransportOptions& options);

  /// Throws kInvalid for a number that is in use, for too many blocks, and as map_memory().
  void add(std::uint64_t block, std::uint64_t size, const Descriptor& descriptor);
  /// Throws kInvalid for a block that does not exist or is in use here.
  void retire(std::uint64_t block);
  bool has(std::uint64_t block) const { return blocks_.contains(block); }
  /// As BlockAdopter.
  Buffer adopt(std::uint64_t block, std::size_t size);

 private:
  struct Block;
  const std::shared_ptr<LocalShare> share_;
  const BufferAllocator allocator_;
  const bool always_copies_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Block>> blocks_;
};

}  // namespace torchspan::net
