#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include <torchspan/detail/core/mutex.h>

#include "core/api/descriptor.h"
#include "net/local/block.h"
#include "net/local/local_share.h"
#include "net/stream/lane.h"

namespace torchspan::net {

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

}  // namespace torchspan::net
