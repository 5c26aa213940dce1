#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/metrics.h>
#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"
#include "net/api/local.h"
#include "net/local/ring.h"
#include "net/stream/lane.h"

namespace torchspan::net {

/// The first page of a block; the segment's bytes follow. The sender sets `lent`, the receiver clears it. A
/// receiver that clears it too early corrupts only messages to itself.
struct BlockHeader {
  std::atomic<std::uint32_t> lent;
};
inline constexpr std::size_t kBlockHeaderBytes = 4096;
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Most blocks per connection and direction.
inline constexpr std::size_t kMostBlocks = 1024;

class BlockPool;

/// Shared by the channels of one transport. Lent and adopted blocks keep it after the end of the transport.
struct LocalShare {
  explicit LocalShare(LocalOptions options, LocalFaults faults = {});

  /// Reserves room for `size` bytes in the pool; returns false if there is none.
  bool reserve(std::uint64_t size);
  void release(std::uint64_t size);
  void add_pool(std::weak_ptr<BlockPool> pool);
  std::vector<std::shared_ptr<BlockPool>> pools();

  const LocalOptions options;
  const LocalFaults faults;
  Metrics own_metrics;  ///< used if the options name none
  Counter &lent, &adopted, &copied, &inlined;
  Counter& pooled;                              ///< bytes
  std::atomic<std::uint64_t> reserved{0};       ///< bytes of the blocks of this side
  std::atomic<std::uint64_t> adopted_bytes{0};  ///< bytes of the peers' blocks that are Buffers of this side

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<BlockPool>> pools_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// Sends notes about blocks to the peer, over the socket. Returns false if a note cannot be sent now.
class BlockNotes {
 public:
  virtual ~BlockNotes() = default;
  virtual bool pass(std::uint64_t block, std::size_t size, const Descriptor& descriptor) = 0;
  virtual bool retire(std::uint64_t block) = 0;
};

/// The sender's blocks for one peer, which it reuses after the peer returned them. Writes to a block only
/// while it is not lent.
class BlockPool final : public Lender {
 public:
  /// `notes` is used until close().
  BlockPool(std::shared_ptr<LocalShare> share, BlockNotes& notes);
  ~BlockPool() override;

  std::uint64_t lend(const Segment& segment) override;
  void take_back(std::uint64_t block) override;
  /// Retires free blocks that were not lent for LocalOptions::idle_after, or up to twice that; returns when
  /// to call again. For the driver.
  Deadline tidy(TimePoint now);
  /// The connection has ended: lends no more blocks.
  void close();

  /// The room of a block for `size` bytes.
  static std::size_t room_for(std::size_t size);

 private:
  struct Block {
    Block(std::uint64_t name, SharedMemory mapped) : number(name), memory(std::move(mapped)) {}

    const std::uint64_t number;
    SharedMemory memory;
    bool used = true;                  ///< since the last tidy()
    bool taken = true;                 ///< lent, and not seen as returned yet
    std::atomic<bool> filling = true;  ///< by one thread; no other thread uses it, whatever the peer writes

    std::atomic<std::uint32_t>& lent() const { return reinterpret_cast<BlockHeader*>(memory.data())->lent; }
    std::byte* bytes() const { return memory.data() + kBlockHeaderBytes; }
    bool free() const {
      if (filling.load(std::memory_order_acquire)) return false;
      return !taken || lent().load(std::memory_order_acquire) == 0;
    }
  };
  struct SizeClass {
    std::vector<std::unique_ptr<Block>> blocks;
    std::size_t next = 0;
  };
  using Retired = std::vector<SharedMemory>;

  Block* take(std::size_t room);
  Block* find_free(SizeClass& size_class, std::size_t probes) TORCHSPAN_REQUIRES(mutex_);
  /// The room must be reserved.
  Block* make(std::size_t room);
  /// Reserves room for a block of `size` bytes; retires free blocks for it if needed, those of this pool
  /// first.
  bool make_room(std::uint64_t size, Retired& retired);
  /// Retires free blocks until `size` bytes can be reserved, and reserves them.
  bool shed(std::uint64_t size, Retired& retired);
  /// Retires free blocks for which `unwanted` returns true, until `enough` does.
  void retire_if(const std::function<bool(Block&)>& unwanted, const std::function<bool()>& enough,
                 Retired& retired) TORCHSPAN_REQUIRES(mutex_);

  const std::shared_ptr<LocalShare> share_;
  Mutex mutex_;
  BlockNotes* notes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::size_t, SizeClass> size_classes_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by room
  std::unordered_map<std::uint64_t, Block*> blocks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_number_ TORCHSPAN_GUARDED_BY(mutex_) = 1;
  Deadline next_tidy_ TORCHSPAN_GUARDED_BY(mutex_) = Deadline::never();
};

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
