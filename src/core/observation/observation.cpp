#include "core/api/observation.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <exception>
#include <fmt/format.h>
#include <optional>
#include <unistd.h>
#include <utility>

#include "core/api/text_server.h"
#include "core/observation/scalar_files.h"
#include "core/observation/trace_writer.h"
#include "core/observation/worker_metrics.h"
#include "core/observation/worker_state.h"

namespace torchspan {

class Observation::Impl {
 public:
  Impl(std::shared_ptr<Runtime> runtime, const ObservationOptions& options, const TraceIdentity& identity,
       DescribeCalls describe_calls)
      : runtime_(std::move(runtime)),
        identity_(identity),
        describe_calls_(std::move(describe_calls)),
        poller_(runtime_->executor.make_poller()),
        collected_at_(runtime_->executor.now() - kInterval) {
    if (!options.trace_folder.empty()) {
      trace_.emplace(*runtime_, options.trace_folder, identity, options.most_trace_spans);
    }
    if (!options.tensorboard_folder.empty() || !options.scalars_folder.empty()) {
      scalars_.emplace(*runtime_, options.tensorboard_folder, options.scalars_folder, identity);
    }
    if (options.metrics_port) serve_metrics(*options.metrics_port);
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
