#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/net/local.h>

#include "net/local/memory.h"
#include "net/stream/lane.h"

namespace torchspan::net {

class BlockPool;

/// What the channels of one transport have in common. Outlives the transport with what it lent or adopted.
struct LocalShare {
  explicit LocalShare(LocalOptions options, LocalFaults faults = {});

  /// Room in the pool for `size` bytes; false when there is none.
  bool reserve(std::uint64_t size);
  void release(std::uint64_t size);
  void enrol(std::weak_ptr<BlockPool> pool);
  std::vector<std::shared_ptr<BlockPool>> pools();

  const LocalOptions options;
  const LocalFaults faults;
  Metrics own_metrics;  ///< when the options name none
  Counter &lent, &adopted, &copied, &inlined;
  Counter& pooled;                              ///< bytes
  std::atomic<std::uint64_t> reserved{0};       ///< bytes of blocks made here
  std::atomic<std::uint64_t> adopted_bytes{0};  ///< of blocks that are Buffers here

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<BlockPool>> pools_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// A block's first page; the segment's bytes follow. The sender lends, the receiver gives back: a receiver
/// that lies about it spoils only what it is sent itself.
struct BlockHeader {
  std::atomic<std::uint32_t> lent;
};
inline constexpr std::size_t kBlockHeaderBytes = 4096;
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

/// Blocks of one connection and direction at most.
inline constexpr std::size_t kMostBlocks = 1024;

/// Tells the peer about blocks, over the socket: false when it cannot be told now.
class BlockNotes {
 public:
  virtual ~BlockNotes() = default;
  virtual bool pass(std::uint64_t block, std::size_t size, const Descriptor& descriptor) = 0;
  virtual bool retire(std::uint64_t block) = 0;
};

/// The sender's blocks for one peer, which get recycled as the peer gives them back. A block is written to
/// only while it is not lent.
class BlockPool final : public Lender {
 public:
  /// `notes` is used until close().
  BlockPool(std::shared_ptr<LocalShare> share, BlockNotes& notes);
  ~BlockPool() override;

  std::uint64_t lend(const Segment& segment) override;
  void take_back(std::uint64_t block) override;
  /// Retires free blocks that were not lent for LocalOptions::idle_after, or up to twice that; returns when
  /// to come again. For the driver.
  Deadline tidy(TimePoint now);
  /// The connection has ended: nothing more is lent.
  void close();

  /// The bytes that a block for `size` bytes has room for.
  static std::size_t room_for(std::size_t size);

 private:
  struct Block {
    Block(std::uint64_t name, SharedMemory mapped) : number(name), memory(std::move(mapped)) {}

    const std::uint64_t number;
    SharedMemory memory;
    bool used = true;                  ///< since tidy() last looked
    bool taken = true;                 ///< not free for what this side knows
    std::atomic<bool> filling = true;  ///< by one thread; whatever the peer says, nobody else touches it

    std::atomic<std::uint32_t>& lent() const { return reinterpret_cast<BlockHeader*>(memory.data())->lent; }
    std::byte* bytes() const { return memory.data() + kBlockHeaderBytes; }
    bool free() const {
      if (filling.load(std::memory_order_acquire)) return false;
      return !taken || lent().load(std::memory_order_acquire) == 0;
    }
  };
  struct Shelf {
    std::vector<std::unique_ptr<Block>> blocks;
    std::size_t next = 0;
  };
  using Retired = std::vector<SharedMemory>;

  Block* take(std::size_t room);
  Block* find_free(Shelf& shelf, std::size_t probes) TORCHSPAN_REQUIRES(mutex_);
  /// With the room for it reserved.
  Block* make(std::size_t room);
  /// Reserves room for a block of `size` bytes, at the cost of free ones if need be: of this pool first.
  bool make_room(std::uint64_t size, Retired& retired);
  /// Retires free blocks until `size` bytes can be reserved, and reserves them.
  bool shed(std::uint64_t size, Retired& retired);
  /// Retires free blocks of which `unwanted` is true, until `enough`.
  void retire_if(const std::function<bool(Block&)>& unwanted, const std::function<bool()>& enough,
                 Retired& retired) TORCHSPAN_REQUIRES(mutex_);

  const std::shared_ptr<LocalShare> share_;
  Mutex mutex_;
  BlockNotes* notes_ TORCHSPAN_GUARDED_BY(mutex_);
  std::map<std::size_t, Shelf> shelves_ TORCHSPAN_GUARDED_BY(mutex_);  ///< by room
  std::unordered_map<std::uint64_t, Block*> blocks_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t next_number_ TORCHSPAN_GUARDED_BY(mutex_) = 1;
  Deadline next_tidy_ TORCHSPAN_GUARDED_BY(mutex_) = Deadline::never();
};

/// The peer's blocks as the receiver has mapped them. For one thread; the Buffers are for any.
class BlockShelf {
 public:
  BlockShelf(std::shared_ptr<LocalShare> share, const TransportOptions& options);

  /// Throws kInvalid for a number that is in use, for too many blocks, and as map_memory().
  void add(std::uint64_t block, std::uint64_t size, const Descriptor& descriptor);
  /// Throws kInvalid for a block that is not there or is held here.
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
