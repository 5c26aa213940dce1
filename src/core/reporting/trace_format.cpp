#include "core/api/trace_format.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include <torchspan/core/error.h>

#include "core/api/hashes.h"

namespace torchspan {
namespace {

constexpr std::uint64_t kTraceMagic = 0x3145434152545354ull;  // "TSTRACE1"

enum TraceBlock : std::uint8_t {
  kIdentityBlock = 1,
  kNamesBlock,
  kThreadsBlock,
  kSpansBlock,
  kScalarsBlock,
  kClockBlock,
  kCountersBlock,
  kLostBlock,
  kEndBlock
};

constexpr std::size_t kSpanBytes = 50;
constexpr std::size_t kMostNames = std::size_t{1} << 20;

std::int64_t clock_value(TimePoint time) { return time.time_since_epoch().count(); }
TimePoint clock_time(ByteReader& reader) { return TimePoint(Duration(reader.get<std::int64_t>())); }

void put_names(ByteWriter& block, std::uint32_t first, const std::vector<std::string>& names) {
  block.put(first);
  block.put(static_cast<std::uint32_t>(names.size()));
  for (const std::string& name : names) block.put_string(name);
}

void get_names(ByteReader& reader, std::vector<std::string>& names) {
  const auto first = reader.get<std::uint32_t>();
  const std::size_t count = reader.get_count(4);
  if (first > kMostNames || count > kMostNames) throw_invalid("a trace file has too many names");
  if (names.size() < first + count) names.resize(first + count);
  for (std::size_t i = 0; i < count; ++i) names[first + i] = reader.get_string();
}

TraceIdentity get_identity(ByteReader& reader) {
  TraceIdentity identity;
  identity.name = reader.get_string();
  identity.rank = reader.get<std::int32_t>();
  identity.world_size = reader.get<std::int32_t>();
  identity.host = reader.get_string();
  identity.clock = reader.get_string();
  identity.run = reader.get_string();
  identity.attempt = reader.get<std::int32_t>();
  identity.process = reader.get<std::int64_t>();
  identity.began = reader.get<std::int64_t>();
  identity.unix_began = reader.get<std::int64_t>();
  return identity;
}

/// All at once: a traced run writes several spans for each small call.
std::array<std::byte, kSpanBytes> encode_span(const StoredSpan& span) {
  std::array<std::byte, kSpanBytes> bytes;
  std::byte* next = bytes.data();
  const auto put = [&next](const auto& field) {
    std::memcpy(next, &field, sizeof(field));
    next += sizeof(field);
  };
  put(span.begin);
  put(span.end);
  put(span.link.id);
  put(span.link.bytes);
  put(span.link.peer);
  put(span.link.part);
  put(span.name);
  put(span.thread);
  put(static_cast<std::uint8_t>(span.kind));
  put(static_cast<std::uint8_t>(span.nested ? 1 : 0));
  return bytes;
}

void get_spans(ByteReader& reader, std::vector<StoredSpan>& spans) {
  for (std::size_t count = reader.get_count(kSpanBytes); count > 0; --count) {
    StoredSpan span;
    span.begin = reader.get<std::int64_t>();
    span.end = reader.get<std::int64_t>();
    span.link.id = reader.get<std::uint64_t>();
    span.link.bytes = reader.get<std::uint64_t>();
    span.link.peer = reader.get<std::int32_t>();
    span.link.part = reader.get<std::int32_t>();
    span.name = reader.get<std::uint32_t>();
    span.thread = reader.get<std::uint32_t>();
    span.kind = static_cast<SpanKind>(reader.get<std::uint8_t>());
    span.nested = reader.get<bool>();
    spans.push_back(span);
  }
}

void get_scalars(ByteReader& reader, std::vector<Scalar>& scalars) {
  for (std::size_t count = reader.get_count(28); count > 0; --count) {
    Scalar scalar;
    scalar.tag = reader.get_string();
    scalar.step = reader.get<std::int64_t>();
    scalar.value = reader.get<double>();
    scalar.at = clock_time(reader);
    scalars.push_back(std::move(scalar));
  }
}

void get_clock_samples(ByteReader& reader, std::vector<ClockSample>& samples) {
  for (std::size_t count = reader.get_count(36); count > 0; --count) {
    ClockSample sample;
    sample.rank = reader.get<std::int32_t>();
    sample.sent = clock_time(reader);
    sample.received = clock_time(reader);
    sample.answered = clock_time(reader);
    sample.arrived = clock_time(reader);
    samples.push_back(sample);
  }
}

CounterSample get_counters(ByteReader& reader) {
  CounterSample sample;
  sample.at = reader.get<std::int64_t>();
  for (std::size_t count = reader.get_count(12); count > 0; --count) {
    std::string name = reader.get_string();
    sample.values[std::move(name)] = reader.get<std::uint64_t>();
  }
  return sample;
}

/// Adds a block. Blocks of unknown types are skipped, and so are bytes after the fields that are known.
void decode_block(std::uint8_t type, ByteReader reader, TraceContents& trace) {
  switch (type) {
    case kIdentityBlock:
      trace.identity = get_identity(reader);
      break;
    case kNamesBlock:
      get_names(reader, trace.names);
      break;
    case kThreadsBlock:
      get_names(reader, trace.threads);
      break;
    case kSpansBlock:
      get_spans(reader, trace.spans);
      break;
    case kScalarsBlock:
      get_scalars(reader, trace.scalars);
      break;
    case kClockBlock:
      get_clock_samples(reader, trace.clock_samples);
      break;
    case kCountersBlock:
      trace.counters.push_back(get_counters(reader));
      break;
    case kLostBlock:
      trace.lost = reader.get<std::uint64_t>();
      break;
    case kEndBlock:
      trace.complete = true;
      break;
    default:
      break;
  }
}

/// Removes what a reader could not use: spans with unknown names, and times that run backwards.
void drop_senseless(TraceContents& trace) {
  constexpr std::int64_t kMostTime = std::numeric_limits<std::int64_t>::max() / 4;
  const auto senseless = [&](const StoredSpan& span) {
    return span.name >= trace.names.size() || span.thread >= trace.threads.size() || span.end < span.begin ||
           span.begin < -kMostTime || span.end > kMostTime;
  };
  trace.lost += std::erase_if(trace.spans, senseless);
}

}  // namespace

void TraceEncoder::add(std::uint8_t type, ByteWriter block) {
  file_.put(type);
  file_.put(static_cast<std::uint32_t>(block.size()));
  file_.put_bytes(block.bytes());
  file_.put(crc32c(block.bytes()));
}

void TraceEncoder::identity(const TraceIdentity& identity) {
  file_.put(kTraceMagic);
  ByteWriter block;
  block.put_string(identity.name);
  block.put(identity.rank);
  block.put(identity.world_size);
  block.put_string(identity.host);
  block.put_string(identity.clock);
  block.put_string(identity.run);
  block.put(identity.attempt);
  block.put(identity.process);
  block.put(identity.began);
  block.put(identity.unix_began);
  add(kIdentityBlock, std::move(block));
}

void TraceEncoder::names(std::uint32_t first, const std::vector<std::string>& names) {
  if (names.empty()) return;
  ByteWriter block;
  put_names(block, first, names);
  add(kNamesBlock, std::move(block));
}

void TraceEncoder::threads(std::uint32_t first, const std::vector<std::string>& names) {
  if (names.empty()) return;
  ByteWriter block;
  put_names(block, first, names);
  add(kThreadsBlock, std::move(block));
}

void TraceEncoder::spans(const std::vector<StoredSpan>& spans) {
  if (spans.empty()) return;
  ByteWriter block;
  block.put(static_cast<std::uint32_t>(spans.size()));
  for (const StoredSpan& span : spans) block.put_bytes(encode_span(span));
  add(kSpansBlock, std::move(block));
}

void TraceEncoder::scalars(const std::vector<Scalar>& scalars) {
  if (scalars.empty()) return;
  ByteWriter block;
  block.put(static_cast<std::uint32_t>(scalars.size()));
  for (const Scalar& scalar : scalars) {
    block.put_string(scalar.tag);
    block.put(scalar.step);
    block.put(scalar.value);
    block.put(clock_value(scalar.at));
  }
  add(kScalarsBlock, std::move(block));
}

void TraceEncoder::clock_samples(const std::vector<ClockSample>& samples) {
  if (samples.empty()) return;
  ByteWriter block;
  block.put(static_cast<std::uint32_t>(samples.size()));
  for (const ClockSample& sample : samples) {
    block.put(static_cast<std::int32_t>(sample.rank));
    for (const TimePoint time : {sample.sent, sample.received, sample.answered, sample.arrived}) {
      block.put(clock_value(time));
    }
  }
  add(kClockBlock, std::move(block));
}

void TraceEncoder::counters(const CounterSample& sample) {
  ByteWriter block;
  block.put(sample.at);
  block.put(static_cast<std::uint32_t>(sample.values.size()));
  for (const auto& [name, value] : sample.values) {
    block.put_string(name);
    block.put(value);
  }
  add(kCountersBlock, std::move(block));
}

void TraceEncoder::lost(std::uint64_t spans) {
  ByteWriter block;
  block.put(spans);
  add(kLostBlock, std::move(block));
}

void TraceEncoder::end() { add(kEndBlock, ByteWriter()); }

TraceContents decode_trace(BytesView file) {
  constexpr std::size_t kFrame = 9;  // type, length and checksum
  ByteReader reader(file);
  if (file.empty()) {
    throw_invalid("this trace file is empty: its worker was killed when it created it, or the disk was full");
  }
  if (reader.left() < 8 || reader.get<std::uint64_t>() != kTraceMagic) {
    throw_invalid("this is not a trace file of TorchSpan, or its version is unknown");
  }
  TraceContents trace;
  bool identified = false;
  while (reader.left() >= kFrame) {
    const std::size_t left = reader.left();
    const auto type = reader.get<std::uint8_t>();
    const auto length = reader.get<std::uint32_t>();
    trace.ignored = left;
    if (length > reader.left() || reader.left() - length < 4) break;
    const BytesView block = reader.get_bytes(length);
    if (reader.get<std::uint32_t>() != crc32c(block)) break;
    if (type != kIdentityBlock && !identified) break;
    decode_block(type, ByteReader(block), trace);
    identified = true;
    trace.ignored = reader.left();
  }
  if (!identified) throw_invalid("this trace file has no identity of a worker: it was cut off");
  drop_senseless(trace);
  return trace;
}

}  // namespace torchspan
