#include "rendezvous/messages/messages.h"

#include <random>

#include "core/api/throw_invalid.h"

namespace torchspan::rendezvous {
namespace {

/// Skips what a newer version added to one of the messages that announce the sender's versions.
void skip_if_newer(ByteReader& reader, const ProtocolRange& versions, const ProtocolRange& spoken) {
  if (versions.newest > spoken.newest) reader.get_bytes(reader.left());
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

Register Register::decode(ByteReader& reader, const ProtocolRange& spoken) {
  ByteReader ahead = reader;
  Register message;
  get(ahead, message.versions);
  if (!common_protocol(message.versions, spoken)) {
    reader.get_bytes(reader.left());
    return message;
  }
  message = decode_fields<Register>(reader);
  skip_if_newer(reader, message.versions, spoken);
  return message;
}

Welcome Welcome::decode(ByteReader& reader, const ProtocolRange& spoken) {
  auto message = decode_fields<Welcome>(reader);
  skip_if_newer(reader, message.versions, spoken);
  return message;
}

void put(ByteWriter& writer, const std::vector<Departed>& departed) {
  put_list(writer, departed, [&](const Departed& one) { put_departed(writer, one); });
}

void get(ByteReader& reader, std::vector<Departed>& departed) {
  std::size_t most = kMaxWorkers;
  departed = get_list(reader, 2, [&] { return get_departed(reader, most); });
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

void put(ByteWriter& writer, const Gathered::Run& run) {
  put_number(writer, run.ranks);
  put_number(writer, run.bytes.size());
  writer.put_bytes(run.bytes);
}

void get(ByteReader& reader, Gathered::Run& run) {
  run.ranks = get_number(reader);
  if (run.ranks == 0 || run.ranks > kMaxWorkers) {
    throw_invalid("store message has the bytes of {} ranks", run.ranks);
  }
  const BytesView bytes = reader.get_bytes(get_number(reader));
  run.bytes.assign(bytes.begin(), bytes.end());
}

void put(ByteWriter& writer, const CountSums& sums) {
  put(writer, sums.counts);
  put_list(writer, sums.notes, [&](const CountSums::Note& note) {
    put(writer, note.rank);
    put(writer, note.bytes);
  });
  put_number(writer, sums.noted);
}

void get(ByteReader& reader, CountSums& sums) {
  get(reader, sums.counts);
  sums.notes = get_list(reader, 8, [&] {
    CountSums::Note note;
    note.rank = checked_rank(reader.get<std::int32_t>());
    get(reader, note.bytes);
    return note;
  });
  sums.noted = get_number(reader);
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

void put(ByteWriter& writer, const std::vector<Changes::Change>& changes) {
  put_list(writer, changes, [&](const Changes::Change& change) {
    writer.put(std::holds_alternative<Departed>(change));
    if (const auto* departed = std::get_if<Departed>(&change)) return put_departed(writer, *departed);
    put_members(writer, std::get<Arrived>(change).members);
  });
}

void get(ByteReader& reader, std::vector<Changes::Change>& changes) {
  std::size_t most = kMaxWorkers;
  changes = get_list(reader, 2, [&] {
    return reader.get<bool>() ? Changes::Change(get_departed(reader, most))
                              : Changes::Change(Arrived{get_members(reader)});
  });
}

}  // namespace torchspan::rendezvous
