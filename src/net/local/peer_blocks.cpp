#include "net/local/peer_blocks.h"

#include <cstring>
#include <fmt/format.h>

#include "net/framing.h"
#include "net/local/block.h"
#include "net/local/memory.h"
#include "net/receive_buffers.h"

namespace torchspan::net {

struct PeerBlocks::Block {
  Block(std::shared_ptr<LocalShare> owner, SharedMemory mapped)
      : share(std::move(owner)), memory(std::move(mapped)) {}

  std::byte* bytes() const { return memory.data() + kBlockHeaderBytes; }
  std::size_t room() const { return memory.size() - kBlockHeaderBytes; }
  void give_back() {
    held.store(false, std::memory_order_release);
    reinterpret_cast<BlockHeader*>(memory.data())->lent.store(0, std::memory_order_release);
  }

  const std::shared_ptr<LocalShare> share;
  const SharedMemory memory;
  std::atomic<bool> held{false};
};

PeerBlocks::PeerBlocks(std::shared_ptr<LocalShare> share, const TransportOptions& options)
    : share_(std::move(share)), allocator_(options.allocator), always_copies_(has_own_allocator(options)) {}

void PeerBlocks::add(std::uint64_t block, std::uint64_t size, const Descriptor& descriptor) {
  if (blocks_.size() >= kMostBlocks) {
    throw Error(ErrorKind::kInvalid, fmt::format("passed more than {} blocks of memory", kMostBlocks));
  }
  if (blocks_.contains(block) || block == 0 || size < kBlockHeaderBytes) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("passed block {} twice, or with an invalid number or size", block));
  }
  blocks_.emplace(block, std::make_shared<Block>(share_, map_memory(share_->faults, descriptor, size)));
}

void PeerBlocks::retire(std::uint64_t block) {
  const auto found = blocks_.find(block);
  if (found == blocks_.end() || found->second->held.load(std::memory_order_acquire)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("retired block {}, which does not exist or is in use here", block));
  }
  blocks_.erase(found);
}

Buffer PeerBlocks::adopt(std::uint64_t number, std::size_t size) {
  const auto found = blocks_.find(number);
  if (found == blocks_.end() || size > found->second->room()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("lent {} bytes of block {}, which does not exist or is smaller", size, number));
  }
  const std::shared_ptr<Block>& block = found->second;
  if (block->held.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorKind::kInvalid, fmt::format("lent block {} twice", number));
  }
  const std::uint64_t room = block->room();
  const std::uint64_t most = share_->options.pool_bytes / 2;
  const bool copies =
      always_copies_ || share_->adopted_bytes.fetch_add(room, std::memory_order_relaxed) + room > most;
  if (copies) {
    if (!always_copies_) share_->adopted_bytes.fetch_sub(room, std::memory_order_relaxed);
    Buffer buffer = allocate_segment(allocator_, size);
    if (size != 0) std::memcpy(buffer.data, block->bytes(), size);
    block->give_back();
    share_->copied.add();
    return buffer;
  }
  share_->adopted.add();
  struct Adopted {
    ~Adopted() {
      block->share->adopted_bytes.fetch_sub(block->room(), std::memory_order_relaxed);
      block->give_back();
    }
    const std::shared_ptr<Block> block;
  };
  const std::shared_ptr<Adopted> adopted = ProcessOwned<Adopted>(new Adopted{block});
  return {block->bytes(), size, std::shared_ptr<void>(adopted, block->bytes())};
}

}  // namespace torchspan::net
