#include "collective/shm/shm_algorithms.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fmt/format.h>

namespace torchspan::collective::shm {
namespace {

constexpr std::size_t kLeastUnit = std::size_t{32} << 10;
constexpr std::size_t kMostUnit = std::size_t{256} << 10;

/// Calls visit(data, size) for each piece of the bytes [offset, offset + bytes) of a sequence, which may end before.
template <class Visit>
void for_pieces(const std::vector<Piece>& pieces, std::uint64_t offset, std::size_t bytes, Visit visit) {
  for (const Piece& piece : pieces) {
    if (bytes == 0) return;
    if (offset >= piece.size) {
      offset -= piece.size;
      continue;
    }
    const std::size_t part = std::min<std::size_t>(bytes, piece.size - offset);
    visit(piece.data + offset, part);
    bytes -= part;
    offset = 0;
  }
}

/// The part of a range to fetch that is in bytes [at, at + bytes) of a contribution.
void take_wanted(const FetchRange& want, std::uint64_t at, const std::byte* from, std::size_t bytes) {
  if (at + bytes <= want.from) return;
  const std::size_t skip = want.from > at ? static_cast<std::size_t>(want.from - at) : 0;
  from += skip;
  for_pieces(want.into, at + skip - want.from, bytes - skip, [&](std::byte* to, std::size_t part) {
    std::memcpy(to, from, part);
    from += part;
  });
}

/// The elements of a chunk that a rank reduces; boundaries are at cache lines.
struct Slice {
  std::size_t begin;
  std::size_t end;
};
Slice slice_of(std::size_t elements, std::size_t item, int rank, int ranks) {
  const std::size_t step = std::max<std::size_t>(kLine / item, 1);
  const auto cut = [&](int index) {
    if (index == ranks) return elements;
    return elements * static_cast<std::size_t>(index) / static_cast<std::size_t>(ranks) / step * step;
  };
  return {cut(rank), cut(rank + 1)};
}

std::size_t divide_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

}  // namespace

bool ShmAlgorithms::all_shared() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const Call& call) { return call.shared != 0; });
}

bool ShmAlgorithms::all_in_slots() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const Call& call) { return call.in_slot != 0; });
}

BytesView ShmAlgorithms::note(int rank) const {
  const Call& call = calls_[static_cast<std::size_t>(rank)];
  return BytesView(memory_.slot(rank, call.sequence).bytes)
      .first(std::min<std::size_t>(call.note, kSlotBytes));
}

const std::byte* ShmAlgorithms::in_slot(int rank) const {
  const Call& call = calls_[static_cast<std::size_t>(rank)];
  if (call.note > kSlotBytes || call.bytes > kSlotBytes - call.note) {
    throw_invalid("a member of the group declared more bytes than its slot holds");
  }
  return memory_.slot(rank, call.sequence).bytes.data() + call.note;
}

OpCoroutine ShmAlgorithms::reduce(const Dense& work, std::byte* into) {
  for (const Call& call : calls_) {
    if (call.bytes != work.bytes) {
      throw_invalid("a member of the group declared a shape that does not match its bytes");
    }
  }
  if (work.bytes == 0) return {};
  if (all_in_slots()) {
    if (work.root < 0 || work.root == rank()) reduce_slots(work, into);
    return {};
  }
  if (all_shared()) return into == nullptr ? reduce_shared(work) : scatter_shared(work, into);
  return into == nullptr ? reduce_private(work) : scatter_private(work, into);
}

void ShmAlgorithms::reduce_slots(const Dense& work, std::byte* into) {
  const std::size_t bytes = into == nullptr ? work.bytes : work.bytes / static_cast<std::size_t>(size());
  const std::size_t skip = into == nullptr ? 0 : bytes * static_cast<std::size_t>(rank());
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size(); ++rank) sources.push_back(in_slot(rank) + skip);
  std::byte* const target = into == nullptr ? work.data : into;
  work.kernel({sources, {&target, 1}, bytes / work.item, static_cast<std::size_t>(size())});
}

ShmAlgorithms::Regions ShmAlgorithms::add_regions(std::uint64_t units) {
  Regions regions;
  const auto ranks = static_cast<std::uint64_t>(size());
  units_by_region_.resize(ranks);
  for (std::uint64_t region = 0; region < ranks; ++region) {
    const std::uint64_t first = units * region / ranks, end = units * (region + 1) / ranks;
    std::uint64_t& claimed = units_by_region_[region];
    regions.of.push_back({first, claimed, claimed + (end - first)});
    claimed += end - first;
  }
  units_ += units;
  regions.all_done = units_;
  return regions;
}

std::optional<Error> ShmAlgorithms::why_tensors_lost() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // after reads of the tensors
  if (signals_.broken()) return signals_.breakage();
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == this->rank() || !signals_.has_left(rank)) continue;
    const Call& call = calls_[static_cast<std::size_t>(rank)];
    if (call.shared == 0 || signals_.count(rank, Count::kFinished) > call.sequence) continue;
    return Error(ErrorKind::kDisconnected,
                 fmt::format("{} left the group before the operation had ended", memory_.peer(rank).text));
  }
  return std::nullopt;
}

OpCoroutine ShmAlgorithms::reduce_shared(Dense work) {
  std::vector<std::byte*> places;
  for (int rank = 0; rank < size(); ++rank) {
    places.push_back(memory_.place(rank, calls_[static_cast<std::size_t>(rank)]));
  }
  std::vector<std::byte*> results = places;
  const std::size_t share = work.bytes / (4 * static_cast<std::size_t>(size()));
  const std::size_t step = std::clamp(share, kLeastUnit, kMostUnit) / kLine * kLine;
  const std::uint64_t units = divide_up(work.bytes, step);
  const Regions regions = add_regions(units);
  std::vector<const std::byte*> sources(places.size());
  if (work.root >= 0) results = {places[static_cast<std::size_t>(work.root)]};
  std::vector<std::byte*> targets(results.size());
  const auto reduce_unit = [&](std::uint64_t unit) {
    const std::size_t at = static_cast<std::size_t>(unit) * step;
    for (std::size_t rank = 0; rank < places.size(); ++rank) sources[rank] = places[rank] + at;
    for (std::size_t i = 0; i < results.size(); ++i) targets[i] = results[i] + at;
    // Writes this rank's tensor first: its next reads are there.
    if (work.root < 0) std::swap(targets[0], targets[static_cast<std::size_t>(rank())]);
    work.kernel(
        {sources, targets, std::min(step, work.bytes - at) / work.item, static_cast<std::size_t>(size())});
    signals_.finish_unit();
  };
  // Each rank begins with its region, the same every time, which may still be in its cache. Then any running
  // rank continues with the others, so a rank that sleeps delays no other rank.
  for (int turn = 0; turn < size(); ++turn) {
    const int region = (rank() + turn) % size();
    const Regions::Region& bounds = regions.of[static_cast<std::size_t>(region)];
    while (const auto claimed = signals_.claim_unit(region, bounds.end)) {
      // The claim before the look: a rank that leaves or fails waits for those that it finds in a unit.
      if (auto why = why_tensors_lost()) {
        signals_.break_group(*why);  // before another rank may miss the unit
        signals_.finish_unit(/*done=*/false);
        throw std::move(*why);
      }
      reduce_unit(bounds.first_unit + (*claimed - bounds.begin));
    }
  }
  co_await reach(Count::kUnits, regions.all_done);
}

OpCoroutine ShmAlgorithms::scatter_shared(Dense work, std::byte* into) {
  const std::size_t part = work.bytes / static_cast<std::size_t>(size());
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size(); ++rank) {
    sources.push_back(memory_.place(rank, calls_[static_cast<std::size_t>(rank)]) +
                      part * static_cast<std::size_t>(this->rank()));
  }
  work.kernel({sources, {&into, 1}, part / work.item, static_cast<std::size_t>(size())});
  if (auto why = why_tensors_lost()) throw std::move(*why);
  // The other ranks may still read this rank's tensor.
  const std::uint64_t chunk = ++chunks_;
  signals_.publish(Count::kStaged, chunk);
  signals_.publish(Count::kReduced, chunk);
  signals_.publish(Count::kTaken, chunk);
  co_await reach(Count::kTaken, chunk);
}

/// Per chunk, each rank stages the slices of the other ranks, reduces its own slice, and copies the results of
/// the other ranks, if it gets them. Steps of adjacent chunks overlap, so that ranks wait less for each other.
OpCoroutine ShmAlgorithms::reduce_private(Dense work) {
  const auto ranks = static_cast<std::size_t>(size());
  const std::size_t step = memory_.chunk_bytes() / work.item;
  const std::size_t elements = work.bytes / work.item, chunks = divide_up(elements, step);
  const std::uint64_t base = chunks_;
  chunks_ += chunks;
  const auto length = [=](std::size_t chunk) { return std::min(step, elements - chunk * step); };
  const auto data_of = [=](std::size_t chunk) { return work.data + chunk * step * work.item; };
  const auto slice = [=, this](std::size_t chunk, int rank) {
    const auto [begin, end] = slice_of(length(chunk), work.item, rank, size());
    return Slice{begin * work.item, end * work.item};
  };
  const auto stage = [&, this](std::size_t chunk) {
    const Slice own = slice(chunk, rank());
    std::byte* to = memory_.staging(rank(), base + chunk);
    std::memcpy(to, data_of(chunk), own.begin);
    std::memcpy(to + own.end, data_of(chunk) + own.end, length(chunk) * work.item - own.end);
  };
  const bool gets = work.root < 0 || work.root == rank();
  std::vector<const std::byte*> sources(ranks);
  std::vector<std::byte*> targets;
  const auto reduce_slice = [&, this](std::size_t chunk) {
    const Slice own = slice(chunk, rank());
    for (int rank = 0; rank < size(); ++rank) {
      const bool mine = rank == this->rank();
      sources[static_cast<std::size_t>(rank)] =
          (mine ? data_of(chunk) : memory_.staging(rank, base + chunk)) + own.begin;
    }
    targets.clear();
    if (gets) targets.push_back(data_of(chunk) + own.begin);
    if (work.root != rank()) targets.push_back(memory_.staging(rank(), base + chunk) + own.begin);
    work.kernel({sources, targets, (own.end - own.begin) / work.item, ranks});
  };
  const auto take = [&, this](std::size_t chunk) {
    for (int rank = 0; rank < size(); ++rank) {
      if (rank == this->rank()) continue;
      const Slice theirs = slice(chunk, rank);
      std::memcpy(data_of(chunk) + theirs.begin, memory_.staging(rank, base + chunk) + theirs.begin,
                  theirs.end - theirs.begin);
    }
    signals_.publish(Count::kTaken, base + chunk + 1);
  };
  co_await free_for(base);
  stage(0);
  signals_.publish(Count::kStaged, base + 1);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      co_await free_for(base + chunk + 1);
      stage(chunk + 1);
      signals_.publish(Count::kStaged, base + chunk + 2);
    }
    co_await reach(Count::kStaged, base + chunk + 1);
    reduce_slice(chunk);
    signals_.publish(Count::kReduced, base + chunk + 1);
    if (!gets) {
      signals_.publish(Count::kTaken, base + chunk + 1);
    } else if (chunk > 0) {
      co_await reach(Count::kReduced, base + chunk);
      take(chunk - 1);
    }
  }
  if (!gets) co_return;
  co_await reach(Count::kReduced, base + chunks);
  take(chunks - 1);
}

OpCoroutine ShmAlgorithms::scatter_private(const Dense& work, std::byte* into) {
  const auto ranks = static_cast<std::size_t>(size());
  const std::size_t part = work.bytes / ranks;
  const std::size_t step = memory_.chunk_bytes() / ranks / kLine * kLine;
  const auto length = [=](std::size_t round) { return std::min(step, part - round * step); };
  Fill fill = [=, this](std::size_t round, std::byte* staging) {
    for (std::size_t to = 0; to < ranks; ++to) {
      if (to == static_cast<std::size_t>(rank())) continue;
      std::memcpy(staging + to * step, work.data + to * part + round * step, length(round));
    }
  };
  Take take = [=, this](std::size_t round, std::uint64_t chunk) {
    std::vector<const std::byte*> sources;
    const auto own = static_cast<std::size_t>(rank());
    for (int rank = 0; rank < size(); ++rank) {
      const bool mine = rank == this->rank();
      sources.push_back(mine ? work.data + own * part + round * step
                             : memory_.staging(rank, chunk) + own * step);
    }
    std::byte* const target = into + round * step;
    work.kernel({sources, {&target, 1}, length(round) / work.item, ranks});
  };
  return rounds(divide_up(part, step), std::move(fill), std::move(take), false);
}

OpCoroutine ShmAlgorithms::fetch(std::vector<FetchRange> wants, std::vector<Piece> pieces) {
  const std::uint64_t step = memory_.chunk_bytes();
  std::uint64_t count = 0;
  bool shared = false;
  for (int rank = 0; rank < size(); ++rank) {
    const Call& call = calls_[static_cast<std::size_t>(rank)];
    const FetchRange& want = wants[static_cast<std::size_t>(rank)];
    if (call.in_slot != 0) {
      take_wanted(want, 0, in_slot(rank), call.bytes);
    } else if (call.shared != 0) {
      take_wanted(want, 0, memory_.place(rank, call), call.bytes);
      memory_.unmap(rank, call);
      shared = true;
    } else {
      count = std::max<std::uint64_t>(count, divide_up(call.bytes, step));
    }
  }
  if (shared) {
    if (auto why = why_tensors_lost()) throw std::move(*why);
    count = std::max<std::uint64_t>(count, 1);
  }
  if (count == 0) return {};
  const auto streamed = [=, this](int rank, std::size_t round) -> std::size_t {
    const Call& call = calls_[static_cast<std::size_t>(rank)];
    const std::uint64_t at = round * step;
    if (call.in_slot != 0 || call.shared != 0 || at >= call.bytes) return 0;
    return static_cast<std::size_t>(std::min(step, call.bytes - at));
  };
  Fill fill = [=, this, pieces = std::move(pieces)](std::size_t round, std::byte* staging) {
    for_pieces(pieces, round * step, streamed(rank(), round), [&](const std::byte* from, std::size_t part) {
      std::memcpy(staging, from, part);
      staging += part;
    });
  };
  Take take = [=, this, wants = std::move(wants)](std::size_t round, std::uint64_t chunk) {
    for (int rank = 0; rank < size(); ++rank) {
      take_wanted(wants[static_cast<std::size_t>(rank)], round * step, memory_.staging(rank, chunk),
                  streamed(rank, round));
    }
  };
  return rounds(static_cast<std::size_t>(count), std::move(fill), std::move(take), shared);
}

OpCoroutine ShmAlgorithms::rounds(std::size_t count, Fill fill, Take take, bool until_all_took) {
  const std::uint64_t base = chunks_;
  chunks_ += count;
  for (std::size_t round = 0; round <= count; ++round) {
    if (round < count) {
      co_await free_for(base + round);
      fill(round, memory_.staging(rank(), base + round));
      signals_.publish(Count::kStaged, base + round + 1);
    }
    if (round > 0) {
      co_await reach(Count::kStaged, base + round);
      take(round - 1, base + round - 1);
      signals_.publish(Count::kReduced, base + round);
      signals_.publish(Count::kTaken, base + round);
    }
  }
  if (until_all_took) co_await reach(Count::kTaken, base + count);
}

}  // namespace torchspan::collective::shm
