#include "core/observation/scalar_files.h"

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/hashes.h"
#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"

namespace torchspan {
namespace {

/// Fields of protocol buffers, of which an event file needs three kinds.
class ProtoWriter {
 public:
  void varint(int field, std::uint64_t value) {
    tag(field, 0);
    put_varint(value);
  }
  void fixed64(int field, double value) {
    tag(field, 1);
    bytes_.put(value);
  }
  void fixed32(int field, float value) {
    tag(field, 5);
    bytes_.put(value);
  }
  void text(int field, std::string_view value) { block(field, std::as_bytes(std::span(value))); }
  void block(int field, BytesView value) {
    tag(field, 2);
    put_varint(value.size());
    bytes_.put_bytes(value);
  }
  Bytes take() { return bytes_.take(); }

 private:
  void tag(int field, int type) { put_varint(static_cast<std::uint64_t>(field << 3 | type)); }
  void put_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.put(static_cast<std::uint8_t>(value | 0x80));
    bytes_.put(static_cast<std::uint8_t>(value));
  }

  ByteWriter bytes_;
};

/// The format's checksum: a CRC-32C whose own checksum would not be constant.
std::uint32_t masked_checksum(BytesView bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

/// Appends to a file that exists: a worker that replaces another one goes on with its curve.
Descriptor open_scalar_file(const std::string& folder, const std::string& name) {
  if (folder.empty()) return {};
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  const std::string path = folder + "/" + name;
  Descriptor file(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  if (!file)
    throw_invalid(
        "the file '{}' cannot be created: {}; choose another folder (torchspan run --scalars or "
        "--tensorboard)",
        path, std::strerror(errno));
  return file;
}

}  // namespace

Bytes encode_event_record(BytesView event) {
  ByteWriter length;
  length.put(std::uint64_t{event.size()});
  ByteWriter record;
  record.put_bytes(length.bytes());
  record.put(masked_checksum(length.bytes()));
  record.put_bytes(event);
  record.put(masked_checksum(event));
  return record.take();
}

Bytes encode_event(double unix_seconds, const Scalar* scalar) {
  ProtoWriter event;
  event.fixed64(1, unix_seconds);
  if (scalar == nullptr) {
    event.text(3, "brain.Event:2");
    return event.take();
  }
  ProtoWriter value, summary;
  value.text(1, scalar->tag);
  value.fixed32(2, static_cast<float>(scalar->value));
  summary.block(1, value.take());
  event.varint(2, static_cast<std::uint64_t>(scalar->step));
  event.block(5, summary.take());
  return event.take();
}

std::string encode_scalar_line(double unix_seconds, int rank, const Scalar& scalar) {
  const auto encoded = [](const nlohmann::json& value) {
    return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  nlohmann::json value = scalar.value;
  if (!std::isfinite(scalar.value)) {
    value = std::isnan(scalar.value) ? "nan" : scalar.value > 0 ? "inf" : "-inf";
  }
  return fmt::format(R"({{"time":{},"rank":{},"tag":{},"step":{},"value":{}}})"
                     "\n",
                     encoded(unix_seconds), rank, encoded(scalar.tag), scalar.step, encoded(value));
}

ScalarFiles::ScalarFiles(Runtime& runtime, const std::string& tensorboard_folder,
                         const std::string& lines_folder, const TraceIdentity& identity)
    : runtime_(runtime),
      identity_(identity),
      events_(open_scalar_file(
          tensorboard_folder.empty() ? "" : fmt::format("{}/{}", tensorboard_folder, identity.name),
          fmt::format("events.out.tfevents.{}.{}.{}", identity.unix_began / 1'000'000'000, identity.host,
                      identity.process))),
      lines_(open_scalar_file(lines_folder, fmt::format("{}.{}.jsonl", identity.name, identity.attempt))) {
  append(events_, encode_event_record(encode_event(unix_seconds(runtime.executor.now()), nullptr)));
  // An earlier worker may have been killed in the middle of a line.
  const std::byte end{'\n'};
  std::byte last = end;
  if (lines_) {
    const off_t size = lseek(lines_.get(), 0, SEEK_END);
    if (size > 0 && pread(lines_.get(), &last, 1, size - 1) == 1 && last != end) append(lines_, {&end, 1});
  }
}

double ScalarFiles::unix_seconds(TimePoint at) const {
  return static_cast<double>(identity_.unix_began + (at.time_since_epoch().count() - identity_.began)) / 1e9;
}

void ScalarFiles::write_new() {
  ByteWriter events;
  std::string lines;
  const std::uint64_t lost = lost_;
  for (const Scalar& scalar : runtime_.scalars.read(next_, lost_)) {
    const double at = unix_seconds(scalar.at);
    if (events_) events.put_bytes(encode_event_record(encode_event(at, &scalar)));
    if (lines_) lines += encode_scalar_line(at, identity_.rank, scalar);
  }
  if (lost_ != lost) {
    runtime_.log.warning(fmt::format("{} logged scalars were not written: log fewer of them", lost_ - lost));
  }
  append(events_, events.bytes());
  append(lines_, std::as_bytes(std::span(lines)));
}

void ScalarFiles::append(Descriptor& file, BytesView bytes) {
  const int reason = file ? write_all(file.get(), bytes) : 0;
  if (reason == 0) return;
  runtime_.log.error(fmt::format("logged scalars cannot be written any more: {}", std::strerror(reason)));
  file.reset();
}

}  // namespace torchspan
