#include "collective/shm/group_memory.h"

#include <algorithm>
#include <fmt/format.h>
#include <new>
#include <unistd.h>

namespace torchspan::collective::shm {
namespace {

/// Small enough for the chunks of all ranks to stay in a core's own cache.
constexpr std::uint64_t kChunk = std::uint64_t{256} << 10;
/// Where ranks take turns on a core each turn costs more than the cache gives.
constexpr std::uint64_t kOversubscribedChunk = std::uint64_t{1} << 20;

struct Places {
  std::string trouble;
  std::uint64_t desk = 0;
  std::uint64_t control = 0;

  Bytes encode() const {
    ByteWriter writer;
    writer.put_string(trouble);
    writer.put(desk);
    writer.put(control);
    return writer.take();
  }
  static Places decode(BytesView bytes) {
    ByteReader reader(bytes);
    Places places;
    places.trouble = reader.get_string();
    places.desk = reader.get<std::uint64_t>();
    places.control = reader.get<std::uint64_t>();
    return places;
  }
};

[[noreturn]] void throw_outside() {
  throw Error(ErrorKind::kInvalid, "a member of the group named a place outside its shared memory");
}

void check_place(const Mapping& memory, std::uint64_t offset, std::size_t bytes) {
  if (!memory.holds(offset, bytes) || offset % kLine != 0) throw_outside();
}

}  // namespace

std::unique_ptr<GroupMemory> GroupMemory::make(std::shared_ptr<Hub> hub, std::vector<int> members,
                                               const Gather& gather, const std::vector<int>& answering) {
  std::unique_ptr<GroupMemory> memory(new GroupMemory);
  const std::size_t size = members.size();
  const bool oversubscribed = static_cast<long>(size) > ::sysconf(_SC_NPROCESSORS_ONLN);
  memory->chunk_bytes_ = oversubscribed ? kOversubscribedChunk : kChunk;
  memory->rank_ = static_cast<int>(std::find(members.begin(), members.end(), hub->self()) - members.begin());
  const std::size_t desk_bytes = Desk::bytes_for(memory->chunk_bytes_),
                    control_bytes = Control::bytes_for(size);
  Places mine;
  try {
    memory->own_desk_ = hub->own()->allocate(desk_bytes);
    mine.desk = hub->own()->offset_of(memory->own_desk_.get());
    if (memory->rank_ == 0) {
      memory->own_control_ = hub->own()->allocate(control_bytes);
      mine.control = hub->own()->offset_of(memory->own_control_.get());
      auto* control = new (memory->own_control_.get()) Control;
      control->ranks = static_cast<std::uint32_t>(size);
      control->oversubscribed = oversubscribed ? 1 : 0;
      control->chunk_bytes = memory->chunk_bytes_;
      for (std::size_t rank = 0; rank < size; ++rank) new (control->ranks_control() + rank) RankControl;
    }
  } catch (const Error& error) {
    mine.trouble = error.message();
  }
  const std::vector<Bytes> answers = gather(mine.encode());
  std::vector<Places> places;
  for (std::size_t rank = 0; rank < size; ++rank) {
    places.push_back(Places::decode(answers.at(static_cast<std::size_t>(answering[rank]))));
    if (places.back().trouble.empty()) continue;
    throw Error(ErrorKind::kOverloaded, fmt::format("{} has no memory for this group: {}",
                                                    hub->person(members[rank]).text, places.back().trouble));
  }
  const Mapping& root = hub->memory(members[0]);
  check_place(root, places[0].control, control_bytes);
  auto& control = *reinterpret_cast<Control*>(root.data() + places[0].control);
  if (control.ranks != size || control.chunk_bytes != memory->chunk_bytes_) {
    throw Error(ErrorKind::kInvalid,
                "the ranks of this group see different machines: they differ in its cores");
  }
  for (std::size_t rank = 0; rank < size; ++rank) {
    const Mapping& place = hub->memory(members[rank]);
    check_place(place, places[rank].desk, desk_bytes);
    memory->desks_.push_back(reinterpret_cast<Desk*>(place.data() + places[rank].desk));
  }
  memory->signals_.emplace(hub->runtime().executor, control, memory->rank_);
  memory->members_ = std::move(members);
  memory->hub_ = std::move(hub);
  return memory;
}

std::byte* GroupMemory::place(int rank, const Call& call) const {
  const Mapping& memory = hub_->memory(members_[static_cast<std::size_t>(rank)]);
  if (!memory.holds(call.place, call.bytes)) throw_outside();
  return memory.data() + call.place;
}

std::optional<std::uint64_t> GroupMemory::place_of(const void* data, std::size_t bytes) const {
  if (!hub_->own()->holds(data, bytes)) return std::nullopt;
  return hub_->own()->offset_of(data);
}

}  // namespace torchspan::collective::shm
