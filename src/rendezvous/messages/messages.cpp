#include "rendezvous/messages/messages.h"

#include <algorithm>
#include <concepts>
#include <random>

#include "core/api/throw_invalid.h"

namespace torchspan::rendezvous {
namespace {

constexpr Duration kLongestWait = std::chrono::hours(24 * 365);

template <class T, class Put>
void put_list(ByteWriter& writer, const std::vector<T>& list, Put put) {
  writer.put(static_cast<std::uint32_t>(list.size()));
  for (const T& element : list) put(element);
}

template <std::invocable Get>
auto get_list(ByteReader& reader, std::size_t least_size, Get get) {
  std::vector<decltype(get())> list;
  const std::size_t count = reader.get_count(least_size);
  list.reserve(count);
  for (std::size_t i = 0; i < count; ++i) list.push_back(get());
  return list;
}

void put_blob(ByteWriter& writer, BytesView bytes) {
  writer.put(static_cast<std::uint32_t>(bytes.size()));
  writer.put_bytes(bytes);
}

Bytes get_blob(ByteReader& reader) {
  const BytesView bytes = reader.get_bytes(reader.get_count(1));
  return Bytes(bytes.begin(), bytes.end());
}

void put_time(ByteWriter& writer, TimePoint time) {
  writer.put(std::int64_t{time.time_since_epoch().count()});
}

TimePoint get_time(ByteReader& reader) { return TimePoint(Duration(reader.get<std::int64_t>())); }

void put_duration(ByteWriter& writer, Duration duration) { writer.put(std::int64_t{duration.count()}); }

Duration get_duration(ByteReader& reader) {
  const Duration duration(std::max<std::int64_t>(reader.get<std::int64_t>(), 0));
  return duration == Duration::max() ? duration : std::min(duration, kLongestWait);
}

int get_rank(ByteReader& reader) { return checked_rank(reader.get<std::int32_t>()); }

/// Skips what a newer version added to one of the messages that announce the sender's versions.
void skip_if_newer(ByteReader& reader, const ProtocolRange& versions, const ProtocolRange& spoken) {
  if (versions.newest > spoken.newest) reader.get_bytes(reader.left());
}

/// A rank, or kAnyRank.
int get_optional_rank(ByteReader& reader) {
  ByteReader ahead = reader;
  if (ahead.get<std::int32_t>() != kAnyRank) return get_rank(reader);
  reader = ahead;
  return kAnyRank;
}

ErrorKind get_kind(ByteReader& reader) {
  const auto number = reader.get<std::uint8_t>();
  if (number < static_cast<std::uint8_t>(ErrorKind::kInvalid) ||
      number > static_cast<std::uint8_t>(ErrorKind::kUnsupported)) {
    throw_invalid("store message names error kind {}", number);
  }
  return static_cast<ErrorKind>(number);
}

void put_member(ByteWriter& writer, const Member& member) {
  const std::size_t at = writer.size();
  writer.put(std::uint32_t{0});
  writer.put_string(member.name);
  writer.put(std::int32_t{member.rank});
  writer.put_string(member.address);
  writer.put(member.instance);
  writer.put_string(member.host);
  writer.put_string(member.host_id);
  writer.put(member.pid);
  writer.put(member.uid);
  writer.put(member.start_ticks);
  writer.put(member.functions_digest);
  writer.put(member.incarnation);
  put_range(writer, member.wire);
  writer.patch(at, static_cast<std::uint32_t>(writer.size() - at - sizeof(std::uint32_t)));
}

/// Ignores bytes after the known fields: a newer version may have added some.
Member get_member(ByteReader& all) {
  ByteReader reader(all.get_bytes(all.get_count(1)));
  Member member;
  member.name = reader.get_string();
  member.rank = get_optional_rank(reader);
  member.address = reader.get_string();
  member.instance = reader.get<std::uint64_t>();
  member.host = reader.get_string();
  member.host_id = reader.get_string();
  member.pid = reader.get<std::int64_t>();
  member.uid = reader.get<std::int64_t>();
  member.start_ticks = reader.get<std::uint64_t>();
  member.functions_digest = reader.get<std::uint64_t>();
  member.incarnation = reader.get<std::uint32_t>();
  member.wire = get_range(reader);
  return member;
}

void put_departed(ByteWriter& writer, const Departed& departed) {
  writer.put(departed.died);
  Ranks(departed.ranks).encode(writer);
  if (departed.died) writer.put_string(departed.how);
}

/// `most`: how many ranks may still follow in the message; falls by those that are read.
Departed get_departed(ByteReader& reader, std::size_t& most) {
  Departed departed;
  departed.died = reader.get<bool>();
  const Ranks ranks = Ranks::decode(reader);
  if (ranks.size() > most) throw_invalid("store message names too many ranks");
  most -= ranks.size();
  departed.ranks = ranks.list();
  if (departed.died) departed.how = reader.get_string();
  return departed;
}

}  // namespace

std::uint64_t random_instance() {
  std::random_device random;
  const std::uint64_t number = (std::uint64_t{random()} << 32) | random();
  return number == 0 ? 1 : number;
}

void Register::encode(ByteWriter& writer) const {
  put_range(writer, versions);
  writer.put_string(job);
  put_member(writer, member);
  writer.put(std::int32_t{world_size});
  writer.put(require_same_functions);
  put_list(writer, functions, [&](const std::string& name) { writer.put_string(name); });
  put_duration(writer, timeout);
}

Register Register::decode(ByteReader& reader, const ProtocolRange& spoken) {
  Register message;
  message.versions = get_range(reader);
  if (!common_protocol(message.versions, spoken)) {
    reader.get_bytes(reader.left());
    return message;
  }
  message.job = reader.get_string();
  message.member = get_member(reader);
  message.world_size = reader.get<std::int32_t>();
  message.require_same_functions = reader.get<bool>();
  message.functions = get_list(reader, 4, [&] { return reader.get_string(); });
  message.timeout = get_duration(reader);
  skip_if_newer(reader, message.versions, spoken);
  return message;
}

void Welcome::encode(ByteWriter& writer) const {
  put_members(writer, members);
  put_list(writer, departed, [&](const Departed& one) { put_departed(writer, one); });
  put_range(writer, versions);
}

Welcome Welcome::decode(ByteReader& reader, const ProtocolRange& spoken) {
  Welcome message;
  message.members = get_members(reader);
  std::size_t most = kMaxWorkers;
  message.departed = get_list(reader, 2, [&] { return get_departed(reader, most); });
  message.versions = get_range(reader);
  skip_if_newer(reader, message.versions, spoken);
  return message;
}

void Refused::encode(ByteWriter& writer) const {
  writer.put(kind);
  writer.put_string(text);
  writer.put(static_cast<std::uint8_t>(passing ? 1 : 0));
}

Refused Refused::decode(ByteReader& reader) {
  Refused message;
  message.kind = get_kind(reader);
  message.text = reader.get_string();
  message.passing = reader.get<std::uint8_t>() != 0;
  return message;
}

void Contribute::encode(ByteWriter& writer) const {
  writer.put(call);
  writer.put_string(tag);
  ranks.encode(writer);
  writer.put(round);
  put_duration(writer, timeout);
  put_blob(writer, bytes);
  put_repeated(writer, incarnations);
  put_list(writer, counts, [&](std::uint64_t one) { writer.put(one); });
}

Contribute Contribute::decode(ByteReader& reader) {
  Contribute message;
  message.call = reader.get<std::uint64_t>();
  message.tag = reader.get_string();
  message.ranks = Ranks::decode(reader);
  message.round = reader.get<std::uint64_t>();
  message.timeout = get_duration(reader);
  message.bytes = get_blob(reader);
  message.incarnations = get_repeated(reader);
  message.counts = get_list(reader, 8, [&] { return reader.get<std::uint64_t>(); });
  return message;
}

void Gathered::add(Bytes bytes) {
  if (!runs.empty() && runs.back().bytes == bytes) {
    ++runs.back().ranks;
  } else {
    runs.push_back({1, std::move(bytes)});
  }
}

std::vector<Bytes> Gathered::all(std::size_t ranks) const {
  std::size_t sum = 0;
  for (const Run& run : runs) sum += run.ranks;
  if (sum != ranks) {
    throw_invalid("the store sent the bytes of {} ranks instead of {}", sum, ranks);
  }
  std::vector<Bytes> all;
  all.reserve(ranks);
  for (const Run& run : runs) all.insert(all.end(), run.ranks, run.bytes);
  return all;
}

void Gathered::encode(ByteWriter& writer) const {
  writer.put(call);
  put_list(writer, runs, [&](const Run& run) {
    put_number(writer, run.ranks);
    put_number(writer, run.bytes.size());
    writer.put_bytes(run.bytes);
  });
}

Gathered Gathered::decode(ByteReader& reader) {
  Gathered message;
  message.call = reader.get<std::uint64_t>();
  message.runs = get_list(reader, 2, [&] {
    Run run;
    run.ranks = get_number(reader);
    if (run.ranks == 0 || run.ranks > kMaxWorkers) {
      throw_invalid("store message has the bytes of {} ranks", run.ranks);
    }
    const BytesView bytes = reader.get_bytes(get_number(reader));
    run.bytes.assign(bytes.begin(), bytes.end());
    return run;
  });
  return message;
}

void Summed::encode(ByteWriter& writer) const {
  writer.put(call);
  put_list(writer, sums.counts, [&](std::uint64_t one) { writer.put(one); });
  put_list(writer, sums.notes, [&](const CountSums::Note& note) {
    writer.put(std::int32_t{note.rank});
    put_blob(writer, note.bytes);
  });
  put_number(writer, sums.noted);
}

Summed Summed::decode(ByteReader& reader) {
  Summed message;
  message.call = reader.get<std::uint64_t>();
  message.sums.counts = get_list(reader, 8, [&] { return reader.get<std::uint64_t>(); });
  message.sums.notes = get_list(reader, 8, [&] {
    const int rank = get_rank(reader);
    return CountSums::Note{rank, get_blob(reader)};
  });
  message.sums.noted = get_number(reader);
  return message;
}

void RoundFailed::encode(ByteWriter& writer) const {
  writer.put(call);
  writer.put(kind);
  writer.put_string(text);
}

RoundFailed RoundFailed::decode(ByteReader& reader) {
  RoundFailed message;
  message.call = reader.get<std::uint64_t>();
  message.kind = get_kind(reader);
  message.text = reader.get_string();
  return message;
}

void Changes::add(const Change& change) {
  if (const auto* arrived = std::get_if<Arrived>(&change)) {
    auto* last = list.empty() ? nullptr : std::get_if<Arrived>(&list.back());
    if (last == nullptr) last = &std::get<Arrived>(list.emplace_back(Arrived{}));
    last->members.insert(last->members.end(), arrived->members.begin(), arrived->members.end());
    return;
  }
  const auto& departed = std::get<Departed>(change);
  auto* last = list.empty() ? nullptr : std::get_if<Departed>(&list.back());
  if (last == nullptr || last->died != departed.died || last->how != departed.how) {
    list.emplace_back(departed);
  } else {
    last->ranks.insert(last->ranks.end(), departed.ranks.begin(), departed.ranks.end());
  }
}

void Changes::encode(ByteWriter& writer) const {
  put_list(writer, list, [&](const Change& change) {
    writer.put(std::holds_alternative<Departed>(change));
    if (const auto* departed = std::get_if<Departed>(&change)) return put_departed(writer, *departed);
    put_members(writer, std::get<Arrived>(change).members);
  });
}

Changes Changes::decode(ByteReader& reader) {
  Changes message;
  std::size_t most = kMaxWorkers;
  message.list = get_list(reader, 2, [&] {
    return reader.get<bool>() ? Change(get_departed(reader, most)) : Change(Arrived{get_members(reader)});
  });
  return message;
}

void Ping::encode(ByteWriter& writer) const {
  put_duration(writer, dead_after);
  put_time(writer, sent);
}

Ping Ping::decode(ByteReader& reader) {
  Ping message;
  message.dead_after = get_duration(reader);
  message.sent = get_time(reader);
  return message;
}

void Pong::encode(ByteWriter& writer) const {
  for (const TimePoint time : {sent, received, answered}) put_time(writer, time);
}

Pong Pong::decode(ByteReader& reader) {
  Pong message;
  for (TimePoint* time : {&message.sent, &message.received, &message.answered}) *time = get_time(reader);
  return message;
}

void DeclaredDead::encode(ByteWriter& writer) const { writer.put_string(reason); }

DeclaredDead DeclaredDead::decode(ByteReader& reader) { return {reader.get_string()}; }

void AskMissing::encode(ByteWriter& writer) const { writer.put(call); }

AskMissing AskMissing::decode(ByteReader& reader) { return {reader.get<std::uint64_t>()}; }

void Missing::encode(ByteWriter& writer) const {
  writer.put(call);
  Ranks(ranks).encode(writer);
}

Missing Missing::decode(ByteReader& reader) {
  const auto call = reader.get<std::uint64_t>();
  return {call, Ranks::decode(reader).list()};
}

void GiveUp::encode(ByteWriter& writer) const { writer.put_string(why); }

GiveUp GiveUp::decode(ByteReader& reader) { return {reader.get_string()}; }

}  // namespace torchspan::rendezvous
