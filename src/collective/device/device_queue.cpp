#include "collective/device/device_queue.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <torchspan/detail/device/streams.h>

#include "collective/device/device_engine.h"
#include "core/api/step_part.h"
#include "core/api/throw_invalid.h"
#include "core/api/timeout_notice.h"

namespace torchspan::collective {

void LaunchedWork::release_finished() {
  while (!launches_.empty() && launches_.front().gate->done()) launches_.pop_front();
}

const LaunchedWork::Launch* LaunchedWork::overdue(TimePoint since) const {
  return launches_.empty() || launches_.front().at > since ? nullptr : &launches_.front();
}

void LaunchedWork::list_late(SpanRecorder& spans, TimePoint since, int group) {
  const Launch* late = overdue(since);
  if (listed_ && (late == nullptr || late->number != listed_number_)) listed_.reset();
  if (listed_ || late == nullptr) return;
  listed_number_ = late->number;
  listed_.emplace(spans, SpanKind::kWait, late->text, SpanLink{.id = late->number, .part = group});
}

void LaunchedWork::fail(const Error& cause) {
  listed_.reset();
  try {
    release_finished();
  } catch (...) {  // the device itself has failed: none of these results is trusted
  }
  for (const Launch& launch : launches_) launch.gate->fail(Error(cause).with_call(launch.call));
}

void LaunchedWork::release() {
  for (const Launch& launch : launches_) launch.keep();
  launches_.clear();
}

namespace {

/// Interval at which the thread checks launched work.
constexpr Duration kLook = std::chrono::milliseconds(5);
/// How long an operation may wait for the other ranks, or run, before it is listed as open. The control group lists its
/// announcement later.
constexpr Duration kLaunchListedAfter = std::chrono::milliseconds(150);

/// What a rank sends of a call: its line and its numbers.
at::Tensor announcement_of(const std::string& line, const std::vector<std::int64_t>& numbers,
                           std::uint64_t number) {
  const LineBytes text = pack_line(line, number);
  const std::size_t size = numbers.size() * sizeof(std::int64_t);
  at::Tensor bytes = at::empty({static_cast<std::int64_t>(text.size() + size)}, at::kByte);
  auto* const data = static_cast<char*>(bytes.data_ptr());
  std::copy(text.begin(), text.end(), data);
  if (size != 0) std::memcpy(data + text.size(), numbers.data(), size);
  return bytes;
}

struct Announcement {
  LineBytes line{};
  std::vector<std::int64_t> numbers;
};

Announcement read_announcement(const at::Tensor& bytes) {
  Announcement read;
  const auto size = static_cast<std::size_t>(bytes.numel());
  if (size < kLineBytes || (size - kLineBytes) % sizeof(std::int64_t) != 0) {
    throw_invalid("a rank announced an operation in a form that this version does not know");
  }
  const auto* const data = static_cast<const char*>(bytes.data_ptr());
  std::copy_n(data, kLineBytes, read.line.begin());
  read.numbers.resize((size - kLineBytes) / sizeof(std::int64_t));
  if (!read.numbers.empty()) std::memcpy(read.numbers.data(), data + kLineBytes, size - kLineBytes);
  return read;
}

}  // namespace

/// Runs continuations under a stream of their own, so that they do not delay the streams of callers. Also keeps events
/// of that device for reuse.
class DeviceQueue::QueueExecutor final : public GroupExecutor {
 public:
  QueueExecutor(std::shared_ptr<Runtime> runtime, c10::Stream stream)
      : GroupExecutor(std::move(runtime)), stream_(stream) {}
  void post(UniqueFunction<void()> job) override {
    GroupExecutor::post([stream = stream_, job = std::move(job)]() mutable {
      c10::OptionalStreamGuard guard;
      try {
        guard.reset_stream(stream);
      } catch (const std::exception&) {  // a device that has failed: the job gets its error
      }
      job();
    });
  }
  const device::EventPoolPtr& events() const { return events_; }

 private:
  const c10::Stream stream_;
  const device::EventPoolPtr events_ = std::make_shared<device::EventPool>();
};

struct DeviceQueue::Job {
  Job(std::unique_ptr<DeviceOperation> operation, const c10::Stream& caller, device::EventPoolPtr events)
      : operation(std::move(operation)), caller(caller), events(std::move(events)) {
    mark_ready();
  }
  /// What the group's stream must wait for: the work of the caller's stream so far.
  void mark_ready() { ready.emplace(caller, events); }

  std::unique_ptr<DeviceOperation> operation;
  const c10::Stream caller;
  const device::EventPoolPtr events;
  std::optional<device::Mark> ready;
  std::vector<at::Tensor> tensors;
  std::uint64_t number = 0;
  at::Tensor announcement;
  Future<std::vector<at::Tensor>> agreement;
  UniqueFunction<void(std::shared_ptr<const ValueGate>, std::exception_ptr)> done;

  std::string call() const { return fmt::format("{}, call {} of the group", operation->line, number); }
  /// The work of the stream may use the tensors after this job is gone.
  void keep_memory_for(const c10::Stream& stream) const {
    for (const at::Tensor& tensor : tensors) device::keep_memory_for(tensor, stream);
    if (!operation->values) return;
    for (const at::Tensor& value : operation->values()) device::keep_memory_for(value, stream);
  }
};

DeviceQueue::DeviceQueue(std::shared_ptr<Backend> control, std::unique_ptr<DeviceEngine> engine,
                         std::shared_ptr<GroupFailure> failure, DeviceQueueOptions options)
    : control_(std::move(control)),
      engine_(std::move(engine)),
      failure_(std::move(failure)),
      options_(std::move(options)),
      runtime_(control_->runtime()),
      stream_(device::stream_from_pool(options_.device)),
      continuations_(std::make_shared<QueueExecutor>(
          options_.world ? options_.world->runtime() : std::shared_ptr<Runtime>(control_, &runtime_),
          device::stream_from_pool(options_.device))),
      promised_continuations_(continuations_),
      parker_(runtime_.executor.make_parker()) {}

std::shared_ptr<DeviceQueue> DeviceQueue::make(std::shared_ptr<Backend> control,
                                               std::unique_ptr<DeviceEngine> engine,
                                               std::shared_ptr<GroupFailure> failure,
                                               DeviceQueueOptions options) {
  const std::shared_ptr<DeviceQueue> queue(
      new DeviceQueue(std::move(control), std::move(engine), std::move(failure), std::move(options)));
  queue->thread_ = queue->runtime_.executor.spawn("group", [raw = queue.get()] { raw->run(); });
  const auto& world = queue->options_.world;
  if (!world) return queue;
  world->add(queue);
  if (const auto lost = queue->options_.departed()) queue->break_with(*lost);
  return queue;
}

DeviceQueue::~DeviceQueue() {
  std::deque<std::unique_ptr<Job>> dropped;
  {
    MutexLock lock(mutex_);
    dropped.swap(queue_);
  }
  const Error cancelled(ErrorKind::kCancelled,
                        "the last handle of the group was dropped while this operation was pending");
  for (const auto& job : dropped) fail(*job, cancelled);
  // The other ranks have this rank's announcement, and would wait for it on their devices.
  if (!dropped.empty() && !control_->failure()) {
    control_->abort(Error(ErrorKind::kDisconnected, fmt::format("it destroyed its group while {} was pending",
                                                                dropped.front()->call())));
  }
  if (const auto cause = control_->failure()) failure_->set(*cause);
  stop_thread();
  QueueExecutor::close(std::move(continuations_), options_.world && options_.world->ended());
}

void DeviceQueue::stop_thread() {
  stopping_.store(true);
  parker_->unpark();
  if (thread_.joinable()) thread_.join();
}

void DeviceQueue::member_died(const rendezvous::Member& member, const Error& reason) {
  if (!options_.members.contains(member)) return;
  break_with(departed_member_error(describe(member), reason.message()));
}

void DeviceQueue::break_with(const Error& cause) {
  const bool first_time = !failure_->get();
  fail_pending(cause);
  if (!first_time) return;
  const Error first = *failure_->get();
  engine_->interrupt(first);
  if (!control_->failure()) control_->abort(first);
}

void DeviceQueue::fail_pending(const Error& cause) {
  const Error first = failure_->set(cause);
  std::deque<std::unique_ptr<Job>> failed;
  {
    MutexLock lock(mutex_);
    failed.swap(queue_);
  }
  for (const auto& job : failed) fail(*job, first);
  parker_->unpark();
}

void DeviceQueue::fail(Job& job, const Error& cause) {
  job.done(nullptr, std::make_exception_ptr(Error(cause).with_call(job.call())));
}

void DeviceQueue::submit(std::unique_ptr<DeviceOperation> operation, const std::vector<at::Tensor>& tensors,
                         UniqueFunction<void(std::shared_ptr<const ValueGate>, std::exception_ptr)> done) {
  auto job = std::make_unique<Job>(std::move(operation), device::current_stream(options_.device),
                                   continuations_->events());
  job->operation->line += describe(StepPartScope::current());
  job->tensors = tensors;
  job->done = std::move(done);
  std::unique_ptr<Job> refused;
  {
    MutexLock lock(mutex_);
    job->number = ++called_;
    if (failure_->get() || stopping_.load()) {
      refused = std::move(job);
    } else {
      job->announcement = announcement_of(job->operation->line, job->operation->numbers, job->number);
      // Under the lock, so that announcements have the order of the queue. They contain the part of the step.
      const StepPartScope outside{StepPart()};
      job->agreement = control_->all_gather(job->announcement);
      queue_.push_back(std::move(job));
    }
  }
  if (refused) {
    fail(*refused,
         failure_->get().value_or(Error(ErrorKind::kCancelled, "the group of this call has ended")));
  } else {
    parker_->unpark();
  }
}

std::unique_ptr<DeviceQueue::Job> DeviceQueue::take() {
  MutexLock lock(mutex_);
  if (queue_.empty()) return nullptr;
  auto job = std::move(queue_.front());
  queue_.pop_front();
  return job;
}

void DeviceQueue::run() {
  const c10::DeviceGuard guard(options_.device);
  while (true) {
    auto job = take();
    const bool has_job = job != nullptr;
    if (has_job) run_one(std::move(job));
    const bool busy = watch();
    if (has_job) continue;
    if (stopping_.load() && !busy) return;
    parker_->park(busy ? runtime_.executor.deadline_in(kLook) : Deadline::never());
  }
}

void DeviceQueue::run_one(std::unique_ptr<Job> job) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView unversioned;  // as in put_back()
  std::shared_ptr<EventGate> gate;
  try {
    failure_->throw_if_set();
    if (const auto lost = options_.departed()) throw Error(*lost);
    const CallNumbers numbers = agree(*job);
    {
      const c10::StreamGuard guard(job->caller);
      if (job->operation->prepare) {
        job->operation->prepare(numbers);
        job->mark_ready();  // memory that was reused may still be in use before this
      }
    }
    const c10::StreamGuard guard(stream_);
    job->ready->hold_back(stream_);
    job->operation->launch();
    gate = EventGate::record(stream_, continuations_->events(),
                             job->operation->values ? job->operation->values() : std::vector<at::Tensor>());
  } catch (...) {
    const Error error = to_error(std::current_exception());
    if (!failure_->get()) {
      break_with(Error(error.kind(), fmt::format("{}: {}", job->call(), error.message())));
    }
    job->keep_memory_for(stream_);
    fail(*job, *failure_->get());
    // Parts of the operation may have been launched. Last, because it may wait for other ranks and for the device.
    engine_->abort();
    return;
  }
  auto done = std::move(job->done);
  const std::string call = job->call();
  const std::string text = job->operation->line;
  const std::uint64_t number = job->number;
  const std::shared_ptr<Job> uses(std::move(job));
  launched_.add({call, text, number, runtime_.executor.now(), gate, uses,
                 [uses, stream = stream_] { uses->keep_memory_for(stream); }});
  done(gate, nullptr);
}

void DeviceQueue::wait_for_stream() {
  const auto check = [this](Duration waited) {
    failure_->throw_if_set();
    if (const auto cause = control_->failure()) throw Error(*cause);
    if (const auto cause = engine_->failure()) throw Error(*cause);
    if (waited < kLeftLimit) return;
    if (const auto lost = options_.departed()) throw Error(*lost);
  };
  const auto late = [this] {
    return Error(ErrorKind::kTimedOut, fmt::format("{} has not finished it within {:.3g} s",
                                                   options_.device.str(), to_seconds(options_.timeout)));
  };
  const device::Mark end(stream_, continuations_->events());
  wait_on_host(end, runtime_.executor, options_.timeout, check, late);
}

CallNumbers DeviceQueue::agree(Job& job) {
  std::vector<at::Tensor> all;
  const Deadline listed_from = runtime_.executor.deadline_in(kLaunchListedAfter);
  std::optional<SpanScope> listed;
  try {
    while (!job.agreement.wait_for(kLook * 20)) {
      watch();
      if (!listed && listed_from.passed(runtime_.executor.now())) {
        listed.emplace(runtime_.spans, SpanKind::kWait, job.operation->line,
                       SpanLink{.id = job.number, .part = group_number_});
      }
      failure_->throw_if_set();
    }
    all = job.agreement.wait();
  } catch (const Error& error) {
    if (failure_->get()) throw;
    // The other ranks know this call by its announcement.
    const std::string announced = line_of_tensor("all_gather", job.announcement, {});
    std::string text = error.message();
    for (auto at = text.find(announced); at != std::string::npos; at = text.find(announced)) {
      text.replace(at, announced.size(), job.operation->line);
    }
    throw Error(error.kind(), text);
  }
  CallNumbers numbers;
  std::vector<Announcement> announced;
  for (const at::Tensor& bytes : all) {
    announced.push_back(read_announcement(bytes));
    const std::size_t rank = announced.size() - 1;
    if (announced[rank].line != announced[0].line) {
      throw_different_calls(options_.members.names[0], unpack_line(announced[0].line),
                            options_.members.names[rank], unpack_line(announced[rank].line));
    }
    numbers.push_back(announced[rank].numbers);
  }
  return numbers;
}

bool DeviceQueue::watch() {
  if (launched_.empty() && !failure_->get()) return false;
  try {
    launched_.release_finished();
    launched_.list_late(runtime_.spans, runtime_.executor.now() - kLaunchListedAfter, group_number_);
    if (launched_.empty()) return false;
    const auto* late = launched_.overdue(runtime_.executor.now() - options_.timeout);
    if (failure_->get()) {
      // below
    } else if (const auto cause = control_->failure()) {
      break_with(*cause);
    } else if (const auto found = engine_->failure()) {
      break_with(*found);
    } else if (const auto lost = options_.departed();
               lost && launched_.overdue(runtime_.executor.now() - kLeftLimit) != nullptr) {
      break_with(*lost);
    } else if (late != nullptr) {
      report_timeout({.kind = "wait",
                      .name = late->text,
                      .seconds = to_seconds(options_.timeout),
                      .id = late->number,
                      .part = group_number_});
      break_with(
          Error(ErrorKind::kTimedOut,
                fmt::format("{} was launched on all ranks, but {} has not finished it on {} after {:.3g} "
                            "s: a rank's process or device has stopped, or its device is busy with "
                            "other work for longer than GroupOptions::timeout",
                            late->call, options_.members.name(options_.rank), options_.device.str(),
                            to_seconds(options_.timeout))));
    }
  } catch (...) {
    break_with(
        Error(ErrorKind::kDisconnected,
              fmt::format("{} of {} failed: {}", options_.device.str(), options_.members.name(options_.rank),
                          torchspan::describe(std::current_exception()).text)));
  }
  if (const auto cause = failure_->get()) {
    launched_.fail(*cause);  // first, because abort() may wait for other ranks and for the device
    engine_->abort();
    launched_.release();
  }
  return !launched_.empty();
}

}  // namespace torchspan::collective
