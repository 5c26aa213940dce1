#include "rendezvous/messages/compact.h"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <limits>

namespace torchspan::rendezvous {
namespace {

/// Longest text of which a member may repeat a part of the one before, so that few bytes cannot describe
/// gigabytes.
constexpr std::size_t kMostShared = 255;

/// Flags of a member: which fields are those of the member before, and whether fields of a newer version follow.
enum : std::uint8_t {
  kHost = 1,
  kHostId = 2,
  kUid = 4,
  kFunctions = 8,
  kIncarnation = 16,
  kWire = 32,
  kAddedFields = 128,
  kKnownFlags = 191
};

std::uint64_t zigzag(std::int64_t number) {
  return (static_cast<std::uint64_t>(number) << 1) ^ static_cast<std::uint64_t>(number >> 63);
}
std::int64_t unzigzag(std::uint64_t number) {
  return static_cast<std::int64_t>(number >> 1) ^ -static_cast<std::int64_t>(number & 1);
}
void put_signed(ByteWriter& writer, std::int64_t number) { put_number(writer, zigzag(number)); }
std::int64_t get_signed(ByteReader& reader) { return unzigzag(get_number(reader)); }

[[noreturn]] void refuse(const std::string& what) { throw_invalid("store message " + what); }

/// A count of elements of at least one byte each.
std::size_t get_size(ByteReader& reader, std::size_t least_size = 1) {
  const std::uint64_t count = get_number(reader);
  if (count > reader.left() / least_size)
    refuse(fmt::format("claims {} elements that it does not have", count));
  return static_cast<std::size_t>(count);
}

/// A text as the length that it shares with `before`, and its rest.
void put_text(ByteWriter& writer, std::string_view text, std::string_view before) {
  const std::size_t most = std::min({text.size(), before.size(), kMostShared});
  const auto shared = static_cast<std::size_t>(
      std::mismatch(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(most), before.begin()).first -
      text.begin());
  put_number(writer, shared);
  put_number(writer, text.size() - shared);
  writer.put_bytes(std::as_bytes(std::span(text.substr(shared))));
}

std::string get_text(ByteReader& reader, std::string_view before) {
  const std::uint64_t shared = get_number(reader);
  if (shared > std::min(before.size(), kMostShared)) refuse("repeats a text that is not there");
  std::string text(before.substr(0, static_cast<std::size_t>(shared)));
  const BytesView rest = reader.get_bytes(get_size(reader));
  text.append(reinterpret_cast<const char*>(rest.data()), rest.size());
  return text;
}

template <class T>
T get_limited(std::uint64_t number) {
  if (number > std::numeric_limits<T>::max())
    refuse(fmt::format("has {} where a smaller number belongs", number));
  return static_cast<T>(number);
}

/// What the first member of a list is compared with.
Member none() {
  Member member;
  member.rank = -1;
  return member;
}

void put_member(ByteWriter& writer, const Member& member, const Member& before) {
  const auto repeats = [](const std::string& text, const std::string& last) {
    return text == last && text.size() <= kMostShared;
  };
  const bool host = repeats(member.host, before.host), host_id = repeats(member.host_id, before.host_id);
  std::uint8_t same = 0;
  if (host) same |= kHost;
  if (host_id) same |= kHostId;
  if (member.uid == before.uid) same |= kUid;
  if (member.functions_digest == before.functions_digest) same |= kFunctions;
  if (member.incarnation == before.incarnation) same |= kIncarnation;
  if (member.wire == before.wire) same |= kWire;
  writer.put(same);
  put_signed(writer, std::int64_t{member.rank} - before.rank - 1);
  put_text(writer, member.name, before.name);
  put_text(writer, member.address, before.address);
  writer.put(member.instance);
  put_signed(writer, member.pid);
  put_number(writer, member.start_ticks);
  if (!host) put_text(writer, member.host, "");
  if (!host_id) put_text(writer, member.host_id, "");
  if ((same & kUid) == 0) put_signed(writer, member.uid);
  if ((same & kFunctions) == 0) writer.put(member.functions_digest);
  if ((same & kIncarnation) == 0) put_number(writer, member.incarnation);
  if ((same & kWire) == 0) put_range(writer, member.wire);
}
constexpr std::size_t kLeastMemberBytes = 1 + 1 + 2 + 2 + 8 + 1 + 1;

Member get_member(ByteReader& reader, const Member& before) {
  Member member;
  const auto same = reader.get<std::uint8_t>();
  if ((same & ~kKnownFlags) != 0) refuse(fmt::format("has a member with flags {}", same));
  const std::int64_t step = get_signed(reader);
  if (step < -kMaxWorkers || step > kMaxWorkers) refuse("names a rank that no world has");
  member.rank = checked_rank(std::int64_t{before.rank} + 1 + step);
  member.name = get_text(reader, before.name);
  member.address = get_text(reader, before.address);
  member.instance = reader.get<std::uint64_t>();
  member.pid = get_signed(reader);
  member.start_ticks = get_number(reader);
  if (before.host.size() > kMostShared && (same & kHost) != 0) refuse("repeats a long text");
  if (before.host_id.size() > kMostShared && (same & kHostId) != 0) refuse("repeats a long text");
  member.host = (same & kHost) != 0 ? before.host : get_text(reader, "");
  member.host_id = (same & kHostId) != 0 ? before.host_id : get_text(reader, "");
  member.uid = (same & kUid) != 0 ? before.uid : get_signed(reader);
  member.functions_digest = (same & kFunctions) != 0 ? before.functions_digest : reader.get<std::uint64_t>();
  member.incarnation =
      (same & kIncarnation) != 0 ? before.incarnation : get_limited<std::uint32_t>(get_number(reader));
  member.wire = (same & kWire) != 0 ? before.wire : get_range(reader);
  if ((same & kAddedFields) != 0) reader.get_bytes(get_size(reader));
  return member;
}

/// The length of the longest prefix of `ranks` with constant steps.
std::size_t run_of(std::span<const int> ranks) {
  if (ranks.size() < 3) return ranks.empty() ? 0 : 1;
  const std::int64_t step = std::int64_t{ranks[1]} - ranks[0];
  std::size_t length = 2;
  while (length < ranks.size() && std::int64_t{ranks[length]} - ranks[length - 1] == step) ++length;
  return length < 3 ? 1 : length;
}

}  // namespace

void put_number(ByteWriter& writer, std::uint64_t number) {
  for (; number >= 0x80; number >>= 7) writer.put(static_cast<std::uint8_t>(number | 0x80));
  writer.put(static_cast<std::uint8_t>(number));
}

std::uint64_t get_number(ByteReader& reader) {
  std::uint64_t number = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    const auto byte = reader.get<std::uint8_t>();
    const std::uint64_t part = byte & 0x7f;
    if (shift == 63 && part > 1) break;
    number |= part << shift;
    if (byte < 0x80) return number;
  }
  refuse("has a number of more than 64 bits");
}

int checked_rank(std::int64_t rank) {
  if (rank < 0 || rank >= kMaxWorkers) refuse(fmt::format("names rank {}", rank));
  return static_cast<int>(rank);
}

Ranks::Ranks(const std::vector<int>& list) {
  const std::span<const int> ranks(list);
  for (std::size_t at = 0; at < ranks.size();) {
    const std::size_t count = run_of(ranks.subspan(at));
    add({ranks[at], count > 1 ? ranks[at + 1] - ranks[at] : 0, count});
    at += count;
  }
}

Ranks::Ranks(std::initializer_list<int> list) : Ranks(std::vector<int>(list)) {}

void Ranks::add(Run run) {
  size_ += run.count;
  runs_.push_back(run);
}

std::vector<int> Ranks::list() const {
  std::vector<int> list;
  list.reserve(size_);
  for (const Run& run : runs_) {
    for (std::size_t i = 0; i < run.count; ++i) list.push_back(run.first + run.step * static_cast<int>(i));
  }
  return list;
}

bool Ranks::contains(int rank) const {
  const auto after = std::upper_bound(runs_.begin(), runs_.end(), rank,
                                      [](int wanted, const Run& run) { return wanted < run.first; });
  if (after == runs_.begin()) return false;
  const Run& run = *std::prev(after);
  const int distance = rank - run.first;
  if (run.step <= 0) return distance == 0;
  return distance % run.step == 0 && static_cast<std::size_t>(distance / run.step) < run.count;
}

void Ranks::encode(ByteWriter& writer) const {
  put_number(writer, runs_.size());
  for (const Run& run : runs_) {
    put_number(writer, run.count);
    put_signed(writer, run.first);
    if (run.count > 1) put_signed(writer, run.step);
  }
}

Ranks Ranks::decode(ByteReader& reader) {
  Ranks ranks;
  for (std::size_t runs = get_size(reader, 2); runs > 0; --runs) {
    const std::uint64_t count = get_number(reader);
    if (count == 0 || count > kMaxWorkers - ranks.size_) refuse(fmt::format("lists {} ranks", count));
    const int first = checked_rank(get_signed(reader));
    const std::int64_t step = count > 1 ? get_signed(reader) : 0;
    if (step < -kMaxWorkers || step > kMaxWorkers) refuse("names a rank that no world has");
    checked_rank(first + step * static_cast<std::int64_t>(count - 1));
    ranks.add({first, static_cast<int>(step), static_cast<std::size_t>(count)});
  }
  return ranks;
}

void put_repeated(ByteWriter& writer, std::span<const std::uint32_t> numbers) {
  const auto length_at = [&](std::size_t at) {
    const auto rest = numbers.subspan(at);
    return static_cast<std::size_t>(
        std::find_if(rest.begin(), rest.end(), [&](std::uint32_t one) { return one != rest[0]; }) -
        rest.begin());
  };
  std::size_t runs = 0;
  for (std::size_t at = 0; at < numbers.size(); at += length_at(at)) ++runs;
  put_number(writer, runs);
  for (std::size_t at = 0; at < numbers.size(); at += length_at(at)) {
    put_number(writer, length_at(at));
    put_number(writer, numbers[at]);
  }
}

std::vector<std::uint32_t> get_repeated(ByteReader& reader) {
  std::vector<std::uint32_t> numbers;
  for (std::size_t runs = get_size(reader, 2); runs > 0; --runs) {
    const std::uint64_t length = get_number(reader);
    if (length == 0 || length > kMaxWorkers - numbers.size()) refuse(fmt::format("lists {} numbers", length));
    numbers.insert(numbers.end(), static_cast<std::size_t>(length),
                   get_limited<std::uint32_t>(get_number(reader)));
  }
  return numbers;
}

void put_members(ByteWriter& writer, std::span<const Member> members) {
  put_number(writer, members.size());
  const Member first = none();
  const Member* before = &first;
  for (const Member& member : members) {
    put_member(writer, member, *before);
    before = &member;
  }
}

std::vector<Member> get_members(ByteReader& reader) {
  std::vector<Member> members;
  const Member first = none();
  const std::size_t count = get_size(reader, kLeastMemberBytes);
  members.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    members.push_back(get_member(reader, members.empty() ? first : members.back()));
  }
  return members;
}

void get(ByteReader& reader, ErrorKind& kind) {
  const auto number = reader.get<std::uint8_t>();
  if (number < static_cast<std::uint8_t>(ErrorKind::kInvalid) ||
      number > static_cast<std::uint8_t>(ErrorKind::kUnsupported)) {
    refuse(fmt::format("names error kind {}", number));
  }
  kind = static_cast<ErrorKind>(number);
}

void put(ByteWriter& writer, const Bytes& bytes) {
  writer.put(static_cast<std::uint32_t>(bytes.size()));
  writer.put_bytes(bytes);
}
void get(ByteReader& reader, Bytes& bytes) {
  const BytesView all = reader.get_bytes(reader.get_count(1));
  bytes.assign(all.begin(), all.end());
}

void get(ByteReader& reader, Duration& duration) {
  constexpr Duration kLongestWait = std::chrono::hours(24 * 365);
  duration = Duration(std::max<std::int64_t>(reader.get<std::int64_t>(), 0));
  if (duration != Duration::max()) duration = std::min(duration, kLongestWait);
}

namespace {

auto fields_of(auto& member) {
  return std::tie(member.name, member.rank, member.address, member.instance, member.host, member.host_id,
                  member.pid, member.uid, member.start_ticks, member.functions_digest, member.incarnation,
                  member.wire);
}

}  // namespace

void put(ByteWriter& writer, const Member& member) {
  const std::size_t at = writer.size();
  writer.put(std::uint32_t{0});
  put_all(writer, fields_of(member));
  writer.patch(at, static_cast<std::uint32_t>(writer.size() - at - sizeof(std::uint32_t)));
}

/// Ignores bytes after the known fields: a newer version may have added some.
void get(ByteReader& all, Member& member) {
  ByteReader reader(all.get_bytes(all.get_count(1)));
  get_all(reader, fields_of(member));
  if (member.rank != kAnyRank) checked_rank(member.rank);
}

}  // namespace torchspan::rendezvous
