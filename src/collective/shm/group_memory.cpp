#include "collective/shm/group_memory.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <new>
#include <sys/mman.h>
#include <unistd.h>

#include "collective/shm/unix_sockets.h"

namespace torchspan::collective::shm {
namespace {

/// Small enough that the chunks of all ranks stay in the L2 cache of a core.
constexpr std::uint64_t kChunk = std::uint64_t{256} << 10;
/// If ranks share a core, larger chunks save context switches, which cost more than cache misses.
constexpr std::uint64_t kOversubscribedChunk = std::uint64_t{1} << 20;

/// A unit takes microseconds; a process that is stopped in one is not waited for.
constexpr Duration kUnitLimit = std::chrono::seconds(1);
/// Smaller contributions stay mapped, which saves page faults.
constexpr std::uint64_t kLeastUnmapped = std::uint64_t{1} << 20;

[[noreturn]] void throw_outside() {
  throw_invalid("a member of the group sent an offset outside its shared memory");
}

void check_place(const SharedMemory& memory, std::uint64_t offset, std::size_t bytes) {
  if (!memory.holds(offset, bytes) || offset % kLine != 0) throw_outside();
}

std::uint64_t new_token() {
  std::uint64_t token = 0;
  const Bytes bytes = random_bytes(sizeof token);
  std::memcpy(&token, bytes.data(), sizeof token);
  return token | 1;  // never 0, the value in fresh memory
}

}  // namespace

struct GroupMemory::Places {
  std::string trouble = {};
  std::uint64_t staging_area = 0;
  std::uint64_t control = 0;
  std::uint64_t token = 0;

  Bytes encode() const {
    ByteWriter writer;
    writer.put_string(trouble);
    writer.put(staging_area);
    writer.put(control);
    writer.put(token);
    return writer.take();
  }
  static Places decode(BytesView bytes) {
    ByteReader reader(bytes);
    Places places;
    places.trouble = reader.get_string();
    places.staging_area = reader.get<std::uint64_t>();
    places.control = reader.get<std::uint64_t>();
    places.token = reader.get<std::uint64_t>();
    return places;
  }
};

GroupMemory::~GroupMemory() {
  if (!signals_) return;
  staging_area(rank_).member_of.store(0, std::memory_order_release);
  const auto unseen = [peer_memory = peer_memory_.get(), members = members_, staging_areas = staging_areas_,
                       tokens = tokens_] {
    for (std::size_t rank = 0; rank < staging_areas.size(); ++rank) {
      const bool here = staging_areas[rank]->member_of.load(std::memory_order_acquire) == tokens[rank];
      if (here && !peer_memory->departed(members[rank])) return false;
    }
    return true;
  };
  peer_memory_->retire(*own_staging_area_, unseen);
  if (own_control_) peer_memory_->retire(*own_control_, unseen);
}

/// All ranks know that the group is not made.
void GroupMemory::release_unused() {
  for (const auto& stretch : {own_staging_area_, own_control_}) {
    if (stretch) peer_memory_->own()->release(*stretch);
  }
}

GroupMemory::Places GroupMemory::reserve(std::size_t staging_area_bytes, std::size_t control_bytes,
                                         bool oversubscribed) {
  peer_memory_->reclaim();
  Arena& arena = *peer_memory_->own();
  own_staging_area_ = arena.reserve(staging_area_bytes);
  Places mine{.staging_area = own_staging_area_->offset, .token = new_token()};
  auto* staging_area = new (arena.mapping().data() + own_staging_area_->offset) StagingArea;
  staging_area->member_of.store(mine.token, std::memory_order_release);
  if (rank_ != 0) return mine;
  own_control_ = arena.reserve(control_bytes);
  mine.control = own_control_->offset;
  auto* control = new (arena.mapping().data() + own_control_->offset) Control;
  control->ranks = static_cast<std::uint32_t>(members_.size());
  control->oversubscribed = oversubscribed ? 1 : 0;
  control->chunk_bytes = chunk_bytes_;
  for (std::size_t rank = 0; rank < members_.size(); ++rank)
    new (control->ranks_control() + rank) RankControl;
  return mine;
}

std::unique_ptr<GroupMemory> GroupMemory::make(std::shared_ptr<PeerMemory> peer_memory,
                                               std::vector<int> members, const GatherBytes& gather,
                                               const std::vector<int>& answering) {
  std::unique_ptr<GroupMemory> memory(new GroupMemory);
  const std::size_t size = members.size();
  const bool oversubscribed = static_cast<long>(size) > ::sysconf(_SC_NPROCESSORS_ONLN);
  memory->chunk_bytes_ = oversubscribed ? kOversubscribedChunk : kChunk;
  memory->rank_ =
      static_cast<int>(std::find(members.begin(), members.end(), peer_memory->self()) - members.begin());
  memory->members_ = std::move(members);
  memory->peer_memory_ = std::move(peer_memory);
  const std::size_t staging_area_bytes = StagingArea::bytes_for(memory->chunk_bytes_),
                    control_bytes = Control::bytes_for(size);
  Places mine;
  try {
    mine = memory->reserve(staging_area_bytes, control_bytes, oversubscribed);
  } catch (const Error& error) {
    mine.trouble = error.message();
  }
  const std::vector<Bytes> answers = gather(mine.encode());
  std::vector<Places> places;
  for (std::size_t rank = 0; rank < size; ++rank) {
    places.push_back(Places::decode(answers.at(static_cast<std::size_t>(answering[rank]))));
    if (places.back().trouble.empty()) continue;
    memory->release_unused();
    throw Error(ErrorKind::kOverloaded,
                fmt::format("{} has no memory for this group: {}", memory->peer(static_cast<int>(rank)).text,
                            places.back().trouble));
  }
  memory->open(places, staging_area_bytes, control_bytes);
  return memory;
}

void GroupMemory::open(const std::vector<Places>& places, std::size_t staging_area_bytes,
                       std::size_t control_bytes) {
  const SharedMemory& root = peer_memory_->memory(members_[0]);
  check_place(root, places[0].control, control_bytes);
  auto& control = *reinterpret_cast<Control*>(root.data() + places[0].control);
  if (control.ranks != members_.size() || control.chunk_bytes != chunk_bytes_) {
    throw_invalid(
        "the ranks of this group see different numbers of cores, so they cannot share memory: give them the "
        "same CPU affinity, or use another backend");
  }
  for (std::size_t rank = 0; rank < members_.size(); ++rank) {
    const SharedMemory& place = peer_memory_->memory(members_[rank]);
    check_place(place, places[rank].staging_area, staging_area_bytes);
    staging_areas_.push_back(reinterpret_cast<StagingArea*>(place.data() + places[rank].staging_area));
    tokens_.push_back(places[rank].token);
  }
  signals_.emplace(peer_memory_->runtime()->executor, control, rank_);
}

std::byte* GroupMemory::place(int rank, const Call& call) const {
  const SharedMemory& memory = peer_memory_->memory(members_[static_cast<std::size_t>(rank)]);
  if (!memory.holds(call.place, call.bytes)) throw_outside();
  return memory.data() + call.place;
}

void GroupMemory::unmap(int rank, const Call& call) const {
  if (rank == rank_ || call.bytes < kLeastUnmapped) return;
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto data = reinterpret_cast<std::uintptr_t>(place(rank, call));
  const std::uintptr_t begin = (data + page - 1) / page * page, end = (data + call.bytes) / page * page;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

void GroupMemory::await_units() {
  Executor& executor = peer_memory_->runtime()->executor;
  const Deadline limit = executor.deadline_in(kUnitLimit);
  for (int rank = 0; rank < size(); ++rank) {
    while (rank != rank_ && signals_->is_in_unit(rank) && !limit.passed(executor.now()) &&
           !peer_memory_->departed(members_[static_cast<std::size_t>(rank)])) {
      executor.sleep(std::chrono::microseconds(50));
    }
  }
}

std::optional<std::uint64_t> GroupMemory::place_of(const void* data, std::size_t bytes) const {
  if (!peer_memory_->own()->holds(data, bytes)) return std::nullopt;
  return peer_memory_->own()->offset_of(data);
}

}  // namespace torchspan::collective::shm
