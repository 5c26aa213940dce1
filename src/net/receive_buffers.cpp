#include "net/receive_buffers.h"

#include <map>
#include <vector>

#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/owner_process.h>

namespace torchspan::net {
namespace {
constexpr std::size_t kLoanGranularity = std::size_t{1} << 20;
}

/// Kept memory, by size. Lives as long as any of it is in use.
struct ReceiveBuffers::Store {
  struct Kept {
    Buffer memory;
    std::uint64_t turn = 0;  ///< when it was released
  };
  using FreeBuffers = std::multimap<std::size_t, Kept>;

  explicit Store(Limits given) : limits(given) {}

  /// Kept memory with room for `size` bytes, or null. Counts it, or what the caller allocates instead, as in
  /// use.
  Buffer take(std::size_t size) {
    MutexLock lock(mutex);
    ++out;
    const auto found = free_buffers.lower_bound(size);
    if (found == free_buffers.end() || found->first - size > found->first / 4) return {};
    Buffer memory = std::move(found->second.memory);
    kept_bytes -= found->first;
    free_buffers.erase(found);
    return memory;
  }
  /// Returns the memory that is not kept; the caller frees it without the lock.
  void give_back(Buffer& memory) {
    MutexLock lock(mutex);
    --out;
    if (closed || memory.data == nullptr || kept_bytes + memory.size > limits.keep) return;
    const std::size_t size = memory.size;
    kept_bytes += size;
    free_buffers.emplace(size, Kept{std::move(memory), turn});
  }
  Deadline tidy(TimePoint now) {
    std::vector<Buffer> freed;
    MutexLock lock(mutex);
    if (out == 0 && free_buffers.empty()) return Deadline::never();
    if (now >= next_turn) {
      for (auto it = free_buffers.begin(); it != free_buffers.end();) {
        const auto entry = it++;
        if (entry->second.turn == turn) continue;
        kept_bytes -= entry->first;
        freed.push_back(std::move(entry->second.memory));
        free_buffers.erase(entry);
      }
      ++turn;
      next_turn = now + limits.idle;
    }
    return out == 0 && free_buffers.empty() ? Deadline::never() : Deadline(next_turn);
  }
  void close() {
    FreeBuffers freed;
    MutexLock lock(mutex);
    closed = true;
    kept_bytes = 0;
    freed.swap(free_buffers);
  }

  const Limits limits;
  mutable Mutex mutex;
  FreeBuffers free_buffers TORCHSPAN_GUARDED_BY(mutex);
  std::uint64_t kept_bytes TORCHSPAN_GUARDED_BY(mutex) = 0;
  std::size_t out TORCHSPAN_GUARDED_BY(mutex) = 0;
  std::uint64_t turn TORCHSPAN_GUARDED_BY(mutex) = 0;
  TimePoint next_turn TORCHSPAN_GUARDED_BY(mutex) = TimePoint::min();
  bool closed TORCHSPAN_GUARDED_BY(mutex) = false;
};

/// Shared by the copies; the last one closes the store.
struct ReceiveBuffers::Share {
  explicit Share(Limits limits) : store(std::make_shared<Store>(limits)) {}
  ~Share() { store->close(); }
  Share(const Share&) = delete;

  const std::shared_ptr<Store> store;
};

ReceiveBuffers::ReceiveBuffers(Limits limits) : share_(make_process_shared<const Share>(limits)) {}

Buffer ReceiveBuffers::operator()(std::size_t size) const {
  const std::shared_ptr<Store>& store = share_->store;
  if (size < store->limits.from || size > store->limits.keep) return allocate_buffer(size);
  struct Loan {
    explicit Loan(std::shared_ptr<Store> lender) : store(std::move(lender)) {}
    ~Loan() { store->give_back(memory); }
    const std::shared_ptr<Store> store;
    Buffer memory;
  };
  const auto loan = make_process_shared<Loan>(store);
  loan->memory = store->take(size);
  if (loan->memory.data == nullptr)
    loan->memory = allocate_buffer((size + kLoanGranularity - 1) / kLoanGranularity * kLoanGranularity);
  return {loan->memory.data, size, std::shared_ptr<void>(loan, loan->memory.data)};
}

Deadline ReceiveBuffers::tidy(TimePoint now) const { return share_->store->tidy(now); }

std::uint64_t ReceiveBuffers::kept_bytes() const {
  MutexLock lock(share_->store->mutex);
  return share_->store->kept_bytes;
}

const ReceiveBuffers* ReceiveBuffers::of(const TransportOptions& options) {
  return options.allocator.target<ReceiveBuffers>();
}

TransportOptions with_receive_buffers(TransportOptions options) {
  if (ReceiveBuffers::of(options) == nullptr && !has_own_allocator(options)) {
    options.allocator = ReceiveBuffers();
  }
  return options;
}

bool has_own_allocator(const TransportOptions& options) {
  if (ReceiveBuffers::of(options) != nullptr) return false;
  const auto* function = options.allocator.target<Buffer (*)(std::size_t)>();
  return function == nullptr || *function != allocate_buffer;
}

}  // namespace torchspan::net
