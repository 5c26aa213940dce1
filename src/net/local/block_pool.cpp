#include "net/local/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/api/throw_invalid.h"
#include "net/framing.h"
#include "net/local/ring.h"
#include "net/receive_buffers.h"

namespace torchspan::net {
namespace {

Metrics& metrics_of(const LocalOptions& options, Metrics& own) {
  return options.metrics != nullptr ? *options.metrics : own;
}

}  // namespace

LocalShare::LocalShare(LocalOptions given, LocalFaults given_faults)
    : options(std::move(given)),
      faults(std::move(given_faults)),
      lent(metrics_of(options, own_metrics).counter("net.local.lent")),
      adopted(metrics_of(options, own_metrics).counter("net.local.adopted")),
      copied(metrics_of(options, own_metrics).counter("net.local.copied")),
      inlined(metrics_of(options, own_metrics).counter("net.local.inlined")),
      pooled(metrics_of(options, own_metrics).gauge("net.local.pool_bytes")) {}

bool LocalShare::reserve(std::uint64_t size) {
  std::uint64_t before = reserved.load(std::memory_order_relaxed);
  do {
    if (size > options.pool_bytes || before > options.pool_bytes - size) return false;
  } while (!reserved.compare_exchange_weak(before, before + size, std::memory_order_relaxed));
  pooled.add(size);
  return true;
}

void LocalShare::release(std::uint64_t size) {
  reserved.fetch_sub(size, std::memory_order_relaxed);
  pooled.subtract(size);
}

void LocalShare::add_pool(std::weak_ptr<BlockPool> pool) {
  MutexLock lock(mutex_);
  std::erase_if(pools_, [](const auto& known) { return known.expired(); });
  pools_.push_back(std::move(pool));
}

std::vector<std::shared_ptr<BlockPool>> LocalShare::pools() {
  std::vector<std::shared_ptr<BlockPool>> all;
  MutexLock lock(mutex_);
  for (const auto& known : pools_) {
    if (auto pool = known.lock()) all.push_back(std::move(pool));
  }
  return all;
}

namespace {

constexpr std::size_t kBlockGranularity = std::size_t{16} << 10;
/// Block sizes between two powers of two: more sizes leave less of a block empty.
constexpr std::size_t kStepsPerDoubling = 8;
/// Blocks that are checked before a new one is made; the others are checked only if none can be made.
constexpr std::size_t kProbes = 32;

}  // namespace

BlockPool::BlockPool(std::shared_ptr<LocalShare> share, BlockNotes& notes)
    : share_(std::move(share)), notes_(&notes) {}

BlockPool::~BlockPool() {
  for (const auto& [room, size_class] : size_classes_)
    share_->release(size_class.blocks.size() * (room + kBlockHeaderBytes));
}

std::size_t BlockPool::room_for(std::size_t size) {
  const std::size_t step =
      std::max(kBlockGranularity, std::bit_floor(std::max(size, kBlockGranularity)) / kStepsPerDoubling);
  return (size + step - 1) / step * step;
}

std::uint64_t BlockPool::lend(const Segment& segment) {
  // The room of a segment larger than the pool could overflow.
  Block* block = segment.size <= share_->options.pool_bytes ? take(room_for(segment.size)) : nullptr;
  if (block == nullptr) {
    share_->inlined.add();
    return 0;
  }
  std::memcpy(block->bytes(), segment.data, segment.size);
  share_->lent.add();
  const std::uint64_t number = block->number;
  // From here on the peer can cause the block to be retired: only its number is safe to use.
  block->filling.store(false, std::memory_order_release);
  return number;
}

void BlockPool::take_back(std::uint64_t block) {
  MutexLock lock(mutex_);
  const auto found = blocks_.find(block);
  if (found != blocks_.end() && !found->second->filling.load(std::memory_order_acquire)) {
    found->second->taken = false;
  }
}

void BlockPool::close() {
  MutexLock lock(mutex_);
  notes_ = nullptr;
}

BlockPool::Block* BlockPool::take(std::size_t room) {
  const std::size_t size = room + kBlockHeaderBytes;
  bool reserved = false;
  {
    MutexLock lock(mutex_);
    if (notes_ == nullptr) return nullptr;
    if (Block* block = find_free(size_classes_[room], kProbes)) return block;
    reserved = blocks_.size() < kMostBlocks && share_->reserve(size);
    if (!reserved) {
      if (Block* block = find_free(size_classes_[room], kMostBlocks)) return block;
    }
  }
  Retired retired;
  return reserved || make_room(size, retired) ? make(room) : nullptr;
}

BlockPool::Block* BlockPool::find_free(SizeClass& size_class, std::size_t probes) {
  const std::size_t count = size_class.blocks.size();
  for (std::size_t i = 0; i < std::min(count, probes); ++i) {
    Block& block = *size_class.blocks[(size_class.next + i) % count];
    if (!block.free()) continue;
    size_class.next = (size_class.next + i) % count;
    block.lent().store(1, std::memory_order_relaxed);
    block.used = block.taken = true;
    block.filling.store(true, std::memory_order_relaxed);
    return &block;
  }
  size_class.next = count == 0 ? 0 : (size_class.next + probes) % count;
  return nullptr;
}

BlockPool::Block* BlockPool::make(std::size_t room) {
  const std::size_t size = room + kBlockHeaderBytes;
  auto made = make_memory(share_->faults, size);
  MutexLock lock(mutex_);
  const std::uint64_t number = next_number_++;
  if (!made || notes_ == nullptr || blocks_.size() >= kMostBlocks ||
      !notes_->pass(number, size, made->descriptor)) {
    share_->release(size);
    return nullptr;
  }
  auto owned = std::make_unique<Block>(number, std::move(made->memory));
  Block* block = owned.get();
  block->lent().store(1, std::memory_order_relaxed);
  size_classes_[room].blocks.push_back(std::move(owned));
  blocks_.emplace(number, block);
  return block;
}

bool BlockPool::make_room(std::uint64_t size, Retired& retired) {
  if (shed(size, retired)) return true;
  for (const auto& other : share_->pools()) {
    if (other.get() != this && other->shed(size, retired)) return true;
  }
  return false;
}

bool BlockPool::shed(std::uint64_t size, Retired& retired) {
  MutexLock lock(mutex_);
  bool reserved = false;
  retire_if([](Block&) { return true; }, [&] { return reserved = share_->reserve(size); }, retired);
  return reserved || share_->reserve(size);
}

void BlockPool::retire_if(const std::function<bool(Block&)>& unwanted, const std::function<bool()>& enough,
                          Retired& retired) {
  if (notes_ == nullptr) return;
  for (auto& [room, size_class] : size_classes_) {
    for (std::size_t i = 0; i < size_class.blocks.size();) {
      Block& block = *size_class.blocks[i];
      if (!unwanted(block) || !block.free() || !notes_->retire(block.number)) {
        ++i;
        continue;
      }
      share_->release(block.memory.size());
      retired.push_back(std::move(block.memory));
      blocks_.erase(block.number);
      std::swap(size_class.blocks[i], size_class.blocks.back());
      size_class.blocks.pop_back();
      if (enough()) return;
    }
  }
}

Deadline BlockPool::tidy(TimePoint now) {
  const Duration idle = share_->options.idle_after;
  Retired retired;
  MutexLock lock(mutex_);
  if (idle == Duration::zero() || blocks_.empty()) return next_tidy_ = Deadline::never();
  if (next_tidy_.passed(now)) {
    retire_if([](Block& block) { return !std::exchange(block.used, false); }, [] { return false; }, retired);
    next_tidy_ = Deadline::never();
  }
  if (blocks_.empty()) return Deadline::never();
  if (next_tidy_.is_never()) next_tidy_ = Deadline(now + idle);
  return next_tidy_;
}

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
    throw_invalid("passed more than {} blocks of memory", kMostBlocks);
  }
  if (blocks_.contains(block) || block == 0 || size < kBlockHeaderBytes) {
    throw_invalid("passed block {} twice, or with an invalid number or size", block);
  }
  blocks_.emplace(block, std::make_shared<Block>(share_, map_memory(share_->faults, descriptor, size)));
}

void PeerBlocks::retire(std::uint64_t block) {
  const auto found = blocks_.find(block);
  if (found == blocks_.end() || found->second->held.load(std::memory_order_acquire)) {
    throw_invalid("retired block {}, which does not exist or is in use here", block);
  }
  blocks_.erase(found);
}

Buffer PeerBlocks::adopt(std::uint64_t number, std::size_t size) {
  const auto found = blocks_.find(number);
  if (found == blocks_.end() || size > found->second->room()) {
    throw_invalid("lent {} bytes of block {}, which does not exist or is smaller", size, number);
  }
  const std::shared_ptr<Block>& block = found->second;
  if (block->held.exchange(true, std::memory_order_acquire)) {
    throw_invalid("lent block {} twice", number);
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
