#include "core/observation/trace_writer.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <unistd.h>

#include <torchspan/core/error.h>

#include "core/api/system_files.h"
#include "core/api/throw_invalid.h"
#include "core/api/write_all.h"

namespace torchspan {

std::uint64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t size = 0, resident = 0;
  file >> size >> resident;
  return file ? resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
}

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

namespace {

/// How long the request and its answer were under way.
Duration delay_of(const ClockSample& sample) {
  return (sample.arrived - sample.sent) - (sample.answered - sample.received);
}

}  // namespace

void FastestSamples::add(const std::vector<ClockSample>& samples) {
  for (const ClockSample& sample : samples) {
    const auto [place, is_first] = fastest_.try_emplace(sample.rank, sample);
    if (!is_first && delay_of(sample) < delay_of(place->second)) place->second = sample;
  }
}

std::vector<ClockSample> FastestSamples::take(TimePoint now) {
  std::vector<ClockSample> samples;
  for (const auto& [rank, sample] : fastest_) {
    known_.insert(rank);
    samples.push_back(sample);
  }
  fastest_.clear();
  begun_ = now;
  return samples;
}

std::vector<ClockSample> FastestSamples::take_if_due(TimePoint now, Duration length) {
  if (now - begun_ >= length) return take(now);
  std::vector<ClockSample> first;
  std::erase_if(fastest_, [&](const auto& entry) {
    const bool is_new = known_.insert(entry.first).second;
    if (is_new) first.push_back(entry.second);
    return is_new;
  });
  return first;
}

namespace {

constexpr std::size_t kTracedSpans = 65536;                   ///< of a thread, between two writes
constexpr Duration kLeastInterval = std::chrono::seconds(1);  ///< between two samples of counters

std::string stem_of(const std::string& folder, const TraceIdentity& identity) {
  std::string name = identity.name;
  for (char& c : name) {
    if (c == '/' || c == '\0') c = '_';
  }
  return fmt::format("{}/{}.{}.{}", folder, name, identity.attempt, identity.process);
}

/// Creates a file that did not exist: a process may have several workers of one name, one after another.
Descriptor create_file(const std::string& folder, const std::string& stem, std::string& path) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  Descriptor file;
  for (int number = 1; !file; ++number) {
    path = number == 1 ? stem + ".trace" : fmt::format("{}.{}.trace", stem, number);
    file = Descriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!file && errno != EEXIST) break;
  }
  if (!file) {
    throw_invalid(
        "the trace file '{}' cannot be created: {}; choose another folder (TORCHSPAN_TRACE, or torchspan run "
        "--trace)",
        path, std::strerror(errno));
  }
  return file;
}

}  // namespace

std::string clock_identity() {
  std::array<char, 64> space{};
  const ssize_t size = readlink("/proc/self/ns/time", space.data(), space.size() - 1);
  return boot_id() + "/" + std::string(space.data(), static_cast<std::size_t>(std::max<ssize_t>(size, 0)));
}

TraceWriter::TraceWriter(Runtime& runtime, const std::string& folder, const TraceIdentity& identity,
                         std::uint64_t most_spans)
    : runtime_(runtime),
      most_spans_(most_spans),
      file_(create_file(folder, stem_of(folder, identity), path_)),
      began_at_(runtime.executor.now()),
      counted_at_(began_at_ - kLeastInterval) {
  runtime_.spans.set_traced(kTracedSpans);
  TraceEncoder encoder;
  encoder.identity(identity);
  append(encoder.take());
}

Duration TraceWriter::sample_interval() const { return (runtime_.executor.now() - began_at_) / 3600; }

std::size_t TraceWriter::encode_new(TraceEncoder& encoder) {
  std::vector<StoredSpan> spans;
  runtime_.spans.read(spans_, spans);
  const std::size_t count = spans.size();
  const std::vector<std::string> names = runtime_.spans.names_from(next_name_);
  const std::vector<std::string> threads = runtime_.spans.threads_from(next_thread_);
  encoder.names(static_cast<std::uint32_t>(next_name_), names);
  encoder.threads(static_cast<std::uint32_t>(next_thread_), threads);
  next_name_ += names.size();
  next_thread_ += threads.size();
  if (spans.size() > most_spans_ - written_) {
    discarded_ += spans.size() - (most_spans_ - written_);
    spans.resize(most_spans_ - written_);
  }
  written_ += spans.size();
  encoder.spans(spans);
  std::uint64_t lost_scalars = 0;
  encoder.scalars(runtime_.scalars.read(next_scalar_, lost_scalars));
  clock_samples_.add(runtime_.clock_samples.read(next_clock_sample_));
  encoder.clock_samples(clock_samples_.take_if_due(runtime_.executor.now(), sample_interval()));
  if (const std::uint64_t lost = spans_.lost + discarded_; lost != reported_lost_) {
    encoder.lost(lost);
    reported_lost_ = lost;
  }
  return count;
}

std::size_t TraceWriter::write_new() {
  return write(runtime_.executor.now() - counted_at_ >= std::max(kLeastInterval, sample_interval()));
}

std::size_t TraceWriter::write(bool with_counters) {
  if (!file_) return 0;
  TraceEncoder encoder;
  const std::size_t count = encode_new(encoder);
  if (with_counters) {
    const TimePoint now = counted_at_ = runtime_.executor.now();
    CounterSample sample{now.time_since_epoch().count(), runtime_.metrics.snapshot()};
    sample.values["process.resident_bytes"] = resident_bytes();
    encoder.counters(sample);
  }
  append(encoder.take());
  return count;
}

void TraceWriter::end() {
  static_cast<void>(write(true));
  TraceEncoder encoder;
  encoder.clock_samples(clock_samples_.take(runtime_.executor.now()));
  encoder.end();
  append(encoder.take());
  file_.reset();
}

void TraceWriter::append(const Bytes& bytes) {
  const int reason = file_ ? write_all(file_.get(), bytes) : 0;
  if (reason == 0) return;
  runtime_.log.error(fmt::format("the trace file '{}' ends here, because it cannot be written: {}", path_,
                                 std::strerror(reason)));
  file_.reset();
}

}  // namespace torchspan
