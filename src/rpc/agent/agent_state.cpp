#include "rpc/agent/agent_state.h"

#include <memory>
#include <utility>

#include <torchspan/detail/rpc/extension.h>

#include "core/api/listed_wait.h"

namespace torchspan::rpc {
namespace {

/// How often a waiting caller polls without a result before it yields its core: the peer may need it.
constexpr unsigned kPollsPerYield = 8;

/// Registers a caller with the driver for as long as the caller polls.
class Driving {
 public:
  Driving(TransportLoop* driver, const std::atomic<bool>& done) : driver_(driver), done_(done) {
    if (driver_ != nullptr) driver_->begin_driving();
  }
  ~Driving() {
    if (driver_ != nullptr) driver_->end_driving(!done_.load(std::memory_order_acquire));
  }
  Driving(const Driving&) = delete;

 private:
  TransportLoop* const driver_;
  const std::atomic<bool>& done_;
};

}  // namespace

void AgentExecutor::wait(Parker& parker, const std::atomic<bool>& done, Deadline deadline) {
  runtime_->check_process();
  Executor& executor = pool_.executor();
  const auto driver = driver_.lock();
  if (driver) driver->check_may_wait();
  const Duration spin = executor.spin_limit();
  if (spin > Duration::zero()) {
    const TimePoint end = executor.now() + spin;
    const Driving driving(driver.get(), done);
    for (unsigned idle = 0; !done.load(std::memory_order_acquire) && executor.now() < end;) {
      if (driver && driver->drive()) {
        idle = 0;
      } else if (!driver || ++idle % kPollsPerYield == 0) {
        executor.yield();
        if (executor.spin_limit() == Duration::zero()) break;
      }
    }
  }
  wait_listed(runtime_->spans, done, deadline, [&](Deadline until) { pool_.wait(parker, done, until); });
}

void AgentExecutor::post(UniqueFunction<void()> job) {
  if (polling_.load(std::memory_order_relaxed) == std::this_thread::get_id())
    return arrived_.push_back(std::move(job));
  pool_.post(std::move(job));
}

void AgentExecutor::receive_here() {
  const auto driver = driver_.lock();
  if (!driver || pool_.executor().spin_limit() == Duration::zero() || !pool_.is_pool_thread() ||
      receiving_.exchange(true)) {
    return;
  }
  driver->begin_driving();
  const auto end = [this](TransportLoop* driven) {
    driven->end_job();
    driven->end_driving(true);
    receiving_.store(false);
  };
  const std::unique_ptr<TransportLoop, decltype(end)> until_the_end(driver.get(), end);
  while (auto job = poll_for_job(*driver)) {
    driver->begin_job();
    job();
    driver->end_job();
  }
}

UniqueFunction<void()> AgentExecutor::poll_for_job(TransportLoop& driver) {
  Executor& executor = pool_.executor();
  const TimePoint begun = executor.now();
  for (unsigned idle = 1; pool_.queued() == 0 && executor.now() - begun < executor.spin_limit(); ++idle) {
    polling_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    driver.drive();
    polling_.store({}, std::memory_order_relaxed);
    if (!arrived_.empty()) break;
    if (idle % kPollsPerYield == 0) executor.yield();
  }
  // One of them may wait for another, so that this thread may run one of them only.
  UniqueFunction<void()> job;
  for (UniqueFunction<void()>& one : arrived_) {
    if (job) {
      pool_.post(std::move(one));
    } else {
      job = std::move(one);
    }
  }
  arrived_.clear();
  return job;
}

UniqueFunction<void()> AgentExecutor::bind(UniqueFunction<void()> continuation) {
  return [environment = Environment::capture(), continuation = std::move(continuation)]() mutable {
    const EnvironmentScope scope(environment);
    std::exchange(continuation, nullptr)();  // destroys the captures inside the scope, too
  };
}

namespace {

PoolOptions pool_options(const ServiceOptions& options) {
  PoolOptions pool;
  pool.name = options.name;
  pool.threads = options.threads;
  pool.max_threads = options.max_threads;
  return pool;
}

}  // namespace

AgentState::AgentState(std::shared_ptr<Runtime> shared_runtime, FunctionTable table, ServiceOptions service)
    : runtime_owner(std::move(shared_runtime)),
      runtime(*runtime_owner),
      functions(std::move(table)),
      options(std::move(service)),
      devices({options.name, options.rank}, options.device_maps),
      self{options.name, options.rank},
      peers(Peer{self, {}, 0, 0}),
      continuations(make_process_shared<AgentExecutor>(runtime_owner, pool_options(options))),
      calls(options.max_pending_calls),
      serving(options.max_waiting_bytes) {
  devices.check_here();
}

}  // namespace torchspan::rpc
