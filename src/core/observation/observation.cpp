#include "core/api/observation.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fmt/format.h>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/observation.h>
#include <torchspan/detail/core/runtime.h>

#include "core/api/parse_number.h"
#include "core/api/span_kinds.h"
#include "core/api/system_files.h"
#include "core/api/text_server.h"
#include "core/api/throw_invalid.h"
#include "core/api/trace_format.h"
#include "core/observation/prometheus.h"
#include "core/observation/scalar_files.h"
#include "core/observation/trace_writer.h"

namespace torchspan {
namespace {

/// The metrics of one worker. For one thread at a time.
class WorkerMetrics {
 public:
  WorkerMetrics(Runtime& runtime, const TraceIdentity& identity) : runtime_(runtime), identity_(identity) {}

  /// Takes in what was recorded since the last call.
  void collect() {
    std::vector<StoredSpan> spans;
    runtime_.spans.read(spans_, spans);
    for (std::string& name : runtime_.spans.names_from(names_.size())) names_.push_back(std::move(name));
    for (const StoredSpan& span : spans) calls_.add(span, names_.at(span.name));
    constexpr std::size_t kMostTags = 1000;
    for (const Scalar& scalar : runtime_.scalars.read(next_scalar_, lost_scalars_)) {
      if (scalars_.contains(scalar.tag) || scalars_.size() < kMostTags) scalars_[scalar.tag] = scalar.value;
    }
  }

  /// Returns the metrics in Prometheus' text format.
  std::string text() {
    collect();
    const std::string rank = std::to_string(identity_.rank);
    PrometheusText out({{"rank", rank}, {"worker", identity_.name}});
    const std::set<std::string> gauges = runtime_.metrics.gauges();
    for (const auto& [name, value] : runtime_.metrics.snapshot()) {
      const bool gauge = gauges.contains(name);
      out.family(metric_name(name) + (gauge ? "" : "_total"), gauge ? "gauge" : "counter",
                 "Counter " + name + ".");
      out.sample("", {}, static_cast<double>(value));
    }
    calls_.write(out);
    if (!scalars_.empty()) {
      out.family("torchspan_scalar", "gauge", "Last value that the program logged for a tag.");
      for (const auto& [tag, value] : scalars_) out.sample("", {{"tag", tag}}, value);
    }
    out.family("torchspan_spans_total", "counter", "Spans recorded, including lost ones.");
    out.sample("", {}, static_cast<double>(runtime_.spans.recorded()));
    out.family("torchspan_spans_lost_total", "counter", "Spans that these metrics do not include.");
    out.sample("", {}, static_cast<double>(spans_.lost));
    out.family("torchspan_process_resident_memory_bytes", "gauge", "Resident memory of the process.");
    out.sample("", {}, static_cast<double>(resident_bytes()));
    out.family("torchspan_process_cpu_seconds_total", "counter", "Processor time of the process.");
    out.sample("", {}, processor_seconds());
    return out.text();
  }

 private:
  Runtime& runtime_;
  const TraceIdentity identity_;
  SpanRecorder::Cursor spans_;
  std::vector<std::string> names_;
  CallHistograms calls_;
  std::uint64_t next_scalar_ = 0;
  std::uint64_t lost_scalars_ = 0;
  std::map<std::string, double> scalars_;  ///< last value, by tag
};

using nlohmann::json;

constexpr std::array kStateKinds = {"call",     "handler", "autograd", "optimizer",  "bucket",
                                    "pipeline", "wait",    "user",     "collective", "checkpoint"};

/// The threads of this process as the kernel sees them: name, state, and what a sleeping one waits in.
json describe_threads() {
  json threads = json::array();
  std::error_code failure;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", failure)) {
    const std::string stat = read_system_line(entry.path() / "stat");
    const auto name_end = stat.rfind(')');
    const std::string state = name_end + 2 < stat.size() ? stat.substr(name_end + 2, 1) : "?";
    threads.push_back({{"id", entry.path().filename().string()},
                       {"name", read_system_line(entry.path() / "comm")},
                       {"state", state},
                       {"in", read_system_line(entry.path() / "wchan")}});
  }
  return threads;
}

std::string_view state_kind(SpanKind kind) {
  if (kind == kMessageSpan) return "message";
  const auto number = static_cast<std::size_t>(kind);
  return number < kStateKinds.size() ? kStateKinds[number] : "other";
}

json describe_open(Runtime& runtime, TimePoint now) {
  json open = json::array();
  for (const OpenOperation& operation : runtime.spans.open()) {
    open.push_back({{"kind", state_kind(operation.kind)},
                    {"name", operation.name},
                    {"seconds", to_seconds(now - operation.begin)},
                    {"id", operation.link.id},
                    {"peer", operation.link.peer},
                    {"part", operation.link.part}});
  }
  return open;
}

/// The spans that this worker's rings still hold.
std::vector<StoredSpan> stored_spans(const Runtime& runtime) {
  SpanRecorder::Cursor cursor;
  std::vector<StoredSpan> spans;
  runtime.spans.read(cursor, spans);
  return spans;
}

/// What calls and replies of the last second have brought from each rank, in bytes.
json describe_traffic(const std::vector<StoredSpan>& spans, TimePoint now) {
  const std::int64_t since = (now - std::chrono::seconds(1)).time_since_epoch().count();
  std::map<std::int32_t, std::uint64_t> received;
  for (const StoredSpan& span : spans) {
    const bool call = span.kind == SpanKind::kCall || span.kind == SpanKind::kHandler;
    if (call && span.end >= since && span.link.peer >= 0) received[span.link.peer] += span.link.bytes;
  }
  json traffic = json::array();
  for (const auto& [peer, bytes] : received) traffic.push_back({{"from", peer}, {"bytes", bytes}});
  return traffic;
}

/// The last operation of each group that this worker has ended, as far as its rings still hold one.
json describe_ended(const Runtime& runtime, const std::vector<StoredSpan>& spans, TimePoint now) {
  std::map<std::int32_t, const StoredSpan*> last;  // by group
  for (const StoredSpan& span : spans) {
    if (span.kind != SpanKind::kCollective) continue;
    const StoredSpan*& place = last[span.link.part];
    if (place == nullptr || place->end <= span.end) place = &span;
  }
  const std::vector<std::string> names = runtime.spans.names_from(0);
  json ended = json::array();
  for (const auto& [group, span] : last) {
    ended.push_back({{"kind", state_kind(span->kind)},
                     {"name", names.at(span->name)},
                     {"seconds", to_seconds(now - TimePoint(Duration(span->end)))},
                     {"id", span->link.id},
                     {"part", group}});
  }
  return ended;
}

/// Describes what a worker does now as a JSON object. `calls` is a JSON value from the rooms above. Ages are seconds.
std::string describe_worker(Runtime& runtime, const TraceIdentity& identity, const std::string& calls,
                            StateDetail detail) {
  const TimePoint now = runtime.executor.now();
  json state = {{"worker", identity.name},
                {"rank", identity.rank},
                {"world", identity.world_size},
                {"host", identity.host},
                {"process", identity.process},
                {"seconds", to_seconds(now.time_since_epoch() - Duration(identity.began))},
                {"open", describe_open(runtime, now)},
                {"calls", json::parse(calls, nullptr, false)}};
  if (detail == StateDetail::kFull) {
    state["resident_bytes"] = resident_bytes();
    state["processor_seconds"] = processor_seconds();
    const std::vector<StoredSpan> spans = stored_spans(runtime);
    state["ended"] = describe_ended(runtime, spans, now);
    state["traffic"] = describe_traffic(spans, now);
    state["threads"] = describe_threads();
    state["counters"] = runtime.metrics.snapshot();
  }
  return state.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::string variable(const std::map<std::string, std::string>& environment, const std::string& name) {
  const auto found = environment.find(name);
  return found == environment.end() ? "" : found->second;
}

/// A number from 0 to `most`; nullopt if the variable is empty.
std::optional<std::uint64_t> number(const std::map<std::string, std::string>& environment,
                                    const std::string& name, std::uint64_t most) {
  const std::string text = variable(environment, name);
  if (text.empty()) return std::nullopt;
  const auto value = parse_number<std::uint64_t>(text);
  if (!value || *value > most) throw_invalid("{} is '{}'; expected a number from 0 to {}", name, text, most);
  return value;
}

}  // namespace

ObservationOptions ObservationOptions::from(const std::map<std::string, std::string>& environment) {
  ObservationOptions options;
  options.trace_folder = variable(environment, "TORCHSPAN_TRACE");
  options.tensorboard_folder = variable(environment, "TORCHSPAN_TENSORBOARD");
  options.scalars_folder = variable(environment, "TORCHSPAN_SCALARS");
  options.socket_folder = variable(environment, "TORCHSPAN_RUNTIME_DIR");
  if (const auto most = number(environment, "TORCHSPAN_TRACE_SPANS", 1'000'000'000)) {
    options.most_trace_spans = *most;
  }
  constexpr std::uint64_t kLastPort = 65535;
  const auto port = number(environment, "TORCHSPAN_METRICS_PORT", kLastPort);
  if (!port) return options;
  const std::uint64_t local_rank = number(environment, "LOCAL_RANK", kLastPort).value_or(0);
  if (*port + local_rank > kLastPort) {
    throw_invalid(
        "TORCHSPAN_METRICS_PORT is {}, and the worker with LOCAL_RANK {} adds its rank: choose a port that "
        "leaves room below {}",
        *port, local_rank, kLastPort);
  }
  options.metrics_port = static_cast<std::uint16_t>(*port == 0 ? 0 : *port + local_rank);
  return options;
}

class Observation::Impl {
 public:
  Impl(std::shared_ptr<Runtime> runtime, const ObservationOptions& options, const TraceIdentity& identity,
       DescribeCalls describe_calls)
      : runtime_(std::move(runtime)),
        identity_(identity),
        describe_calls_(std::move(describe_calls)),
        poller_(runtime_->executor.make_poller()),
        collected_at_(runtime_->executor.now() - kInterval) {
    // First, because it may fail, and what failed must not leave a trace.
    if (options.metrics_port) serve_metrics(*options.metrics_port);
    if (!options.trace_folder.empty()) {
      trace_.emplace(*runtime_, options.trace_folder, identity, options.most_trace_spans);
    }
    if (!options.tensorboard_folder.empty() || !options.scalars_folder.empty()) {
      scalars_.emplace(*runtime_, options.tensorboard_folder, options.scalars_folder, identity);
    }
    if (!options.socket_folder.empty()) serve_state(options.socket_folder);
    if (ticks() || state_) thread_ = runtime_->executor.spawn("torchspan observation", [this] { run(); });
  }
  ~Impl() {
    stopping_.store(true);
    poller_->wake();
    thread_.join();
    if (!socket_path_.empty()) unlink(socket_path_.c_str());
  }
  Impl(const Impl&) = delete;

  std::uint16_t metrics_port() const { return metrics_port_; }

 private:
  static constexpr Duration kInterval = std::chrono::milliseconds(100);
  static constexpr Duration kShortest = std::chrono::milliseconds(5),
                            kLongest = std::chrono::milliseconds(20);

  void serve_metrics(std::uint16_t port) {
    metrics_.emplace(*runtime_, identity_);
    Descriptor listener = listen_on_loopback(port);
    metrics_port_ = port;
    const auto answer = [this](const std::string& path) {
      if (path != "/metrics") return TextReply{.status = 404, .body = "see /metrics\n"};
      return TextReply{.type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_->text()};
    };
    exposer_.emplace(runtime_->executor, *poller_, std::move(listener), std::uint64_t{1} << 40, answer);
  }

  /// The program runs without this socket, too: it only serves commands of users.
  void serve_state(const std::string& folder) {
    const std::string path = fmt::format("{}/observe.{}", folder, identity_.rank);
    try {
      const auto answer = [this](const std::string& request) {
        const bool brief = request == "/activity";
        if (!brief && request != "/state") return TextReply{.status = 404, .body = "see /state, /activity\n"};
        const StateDetail detail = brief ? StateDetail::kBrief : StateDetail::kFull;
        const std::string calls = describe_calls_ ? describe_calls_(detail) : "null";
        return TextReply{.type = "application/json",
                         .body = describe_worker(*runtime_, identity_, calls, detail)};
      };
      state_.emplace(runtime_->executor, *poller_, listen_on_path(path), std::uint64_t{1} << 50, answer);
      socket_path_ = path;
    } catch (const Error& error) {
      runtime_->log.warning("torchspan stacks and top cannot see this worker: " + error.message());
    }
  }

  bool ticks() const { return trace_ || scalars_ || metrics_; }

  Deadline next_deadline() const {
    Deadline next =
        ticks() ? runtime_->executor.deadline_in(trace_ ? interval_ : kInterval) : Deadline::never();
    if (exposer_) next = earlier(next, exposer_->next_deadline());
    if (state_) next = earlier(next, state_->next_deadline());
    return next;
  }

  void run() {
    std::array<Poller::Event, 16> events;
    while (!stopping_.load()) {
      const std::size_t count = poller_->wait(events, next_deadline());
      for (std::size_t i = 0; i < count; ++i) {
        guarded([&] {
          if (!exposer_ || !exposer_->handle(events[i])) {
            if (state_) state_->handle(events[i]);
          }
        });
      }
      guarded([this] { tick(); });
    }
    guarded([this] {
      if (scalars_) scalars_->write_new();
      if (trace_) trace_->end();
    });
  }

  void tick() {
    if (exposer_) exposer_->advance();
    if (state_) state_->advance();
    if (trace_) write_trace();
    const TimePoint now = runtime_->executor.now();
    if (now - collected_at_ < kInterval) return;
    collected_at_ = now;
    if (scalars_) scalars_->write_new();
    if (metrics_) metrics_->collect();
  }

  /// Many spans are written in small parts: threads that poll stop polling when this one takes their core for longer than
  /// a millisecond, and small calls then take twice as long.
  void write_trace() {
    constexpr std::int64_t kAtOnce = 2000;
    const auto count = std::max(static_cast<std::int64_t>(trace_->write_new()), std::int64_t{1});
    interval_ = std::clamp(interval_ * kAtOnce / count, kShortest, kLongest);
  }

  /// A failure of the observation must not end the program that it observes.
  template <class F>
  void guarded(F work) {
    try {
      work();
    } catch (...) {
      runtime_->log.error("the run can no longer be observed completely: " +
                          describe(std::current_exception()).text);
    }
  }

  const std::shared_ptr<Runtime> runtime_;
  const TraceIdentity identity_;
  const DescribeCalls describe_calls_;
  const std::unique_ptr<Poller> poller_;
  std::optional<TraceWriter> trace_;
  std::optional<ScalarFiles> scalars_;
  std::optional<WorkerMetrics> metrics_;
  std::optional<TextServer> exposer_, state_;
  std::uint16_t metrics_port_ = 0;
  std::string socket_path_;
  Duration interval_ = kLongest;  ///< until the trace is written again
  TimePoint collected_at_;
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

Observation::Observation(std::shared_ptr<Runtime> runtime, const ObservationOptions& options,
                         const TraceIdentity& identity, DescribeCalls describe_calls)
    : impl_(std::make_unique<Impl>(std::move(runtime), options, identity, std::move(describe_calls))) {}
Observation::~Observation() = default;
std::uint16_t Observation::metrics_port() const { return impl_->metrics_port(); }

namespace {

/// Reads the monotonic clock and the calendar at the same moment: of several attempts, the one that took least time, in
/// which the thread lost its processor the least.
void read_clocks(Executor& executor, TraceIdentity& identity) {
  Duration least = Duration::max();
  for (int attempt = 0; attempt < 8; ++attempt) {
    const TimePoint before = executor.now();
    timespec calendar{};
    clock_gettime(CLOCK_REALTIME, &calendar);
    const Duration took = executor.now() - before;
    if (took >= least) continue;
    least = took;
    identity.began = (before + took / 2).time_since_epoch().count();
    identity.unix_began = std::int64_t{calendar.tv_sec} * 1'000'000'000 + calendar.tv_nsec;
  }
}

}  // namespace

TraceIdentity identify(Executor& executor, const std::string& name, int rank, int world_size) {
  TraceIdentity identity;
  identity.name = name;
  identity.rank = rank;
  identity.world_size = world_size;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) identity.host = host.data();
  identity.clock = clock_identity();
  identity.process = getpid();
  read_clocks(executor, identity);
  return identity;
}

}  // namespace torchspan
