#include <cstdio>
#include <cstdlib>

#include <torchspan/core/task.h>

namespace torchspan::task_detail {

void thread_ended_in_coroutine() {
  std::fputs(
      "torchspan: error: a coroutine ended its thread (pthread_exit() was called, or the thread was "
      "canceled), so "
      "this process ends: use co_return or throw instead\n",
      stderr);
  std::abort();
}

/// A coroutine that only its handle owns.
struct Flow::Pump {
  struct promise_type {
    Pump get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }
  };
  std::coroutine_handle<promise_type> handle;
};

Flow::Pump Flow::make_pump(Flow& flow) {
  for (;;) {
    flow.run_queued();
    co_await std::suspend_always{};
  }
}

Flow::Flow(std::shared_ptr<TaskEnvironment> environment) : environment_(std::move(environment)) {
  if (environment_) pump_ = make_pump(*this).handle;
}

Flow::~Flow() {
  if (pump_) pump_.destroy();
}

void Flow::run_queued() {
  while (next_) std::exchange(next_, nullptr).resume();
}

void Flow::resume_after(std::coroutine_handle<> handle, std::shared_ptr<FutureStateBase> future) {
  waiting_ = handle;
  awaited_ = std::move(future);
}

void Flow::step(std::coroutine_handle<> first) {
  next_ = first;
  if (environment_) {
    environment_->run(pump_);
  } else {
    run_queued();
  }
  // on_done on another thread may already run the next step: do not touch this flow after it.
  if (auto future = std::exchange(awaited_, nullptr)) {
    future->on_done([self = shared_from_this(), handle = waiting_] { self->step(handle); });
  } else if (auto report = std::exchange(report_, nullptr)) {
    report();
  }
}

}  // namespace torchspan::task_detail
