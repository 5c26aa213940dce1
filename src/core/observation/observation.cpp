#include "core/api/observation.h"

#include <array>
#include <atomic>
#include <chrono>
#include <ctime>
#include <exception>
#include <optional>
#include <unistd.h>
#include <utility>

#include "core/observation/trace_writer.h"

namespace torchspan {

class Observation::Impl {
 public:
  Impl(std::shared_ptr<Runtime> runtime, const ObservationOptions& options, const TraceIdentity& identity)
      : runtime_(std::move(runtime)), poller_(runtime_->executor.make_poller()) {
    if (!options.trace_folder.empty()) {
      trace_.emplace(*runtime_, options.trace_folder, identity, options.most_trace_spans);
    }
    if (trace_) thread_ = runtime_->executor.spawn("torchspan observation", [this] { run(); });
  }
  ~Impl() {
    stopping_.store(true);
    poller_->wake();
    thread_.join();
  }
  Impl(const Impl&) = delete;

 private:
  static constexpr Duration kInterval = std::chrono::milliseconds(100);

  void run() {
    std::array<Poller::Event, 8> events;
    while (!stopping_.load()) {
      poller_->wait(events, runtime_->executor.deadline_in(kInterval));
      guarded([this] {
        if (trace_) trace_->write_new();
      });
    }
    guarded([this] {
      if (trace_) trace_->end();
    });
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
  const std::unique_ptr<Poller> poller_;
  std::optional<TraceWriter> trace_;
  std::atomic<bool> stopping_{false};
  Thread thread_;
};

Observation::Observation(std::shared_ptr<Runtime> runtime, const ObservationOptions& options,
                         const TraceIdentity& identity)
    : impl_(std::make_unique<Impl>(std::move(runtime), options, identity)) {}
Observation::~Observation() = default;

TraceIdentity identify(Executor& executor, const std::string& name, int rank, int world_size) {
  TraceIdentity identity;
  identity.name = name;
  identity.rank = rank;
  identity.world_size = world_size;
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) identity.host = host.data();
  identity.clock = clock_identity();
  identity.process = getpid();
  identity.began = executor.now().time_since_epoch().count();
  timespec calendar{};
  clock_gettime(CLOCK_REALTIME, &calendar);
  identity.unix_began = std::int64_t{calendar.tv_sec} * 1'000'000'000 + calendar.tv_nsec;
  return identity;
}

}  // namespace torchspan
