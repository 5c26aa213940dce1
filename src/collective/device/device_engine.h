#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/collective.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/executor.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>

#include "device/api/device_runtime.h"

namespace torchspan::collective {

/// The first failure of a group on this rank. Any thread sets it; everything that waits for other ranks or for
/// a device checks it. Thread-safe.
class GroupFailure {
 public:
  /// Returns the first failure, which is `cause` if none was set.
  Error set(const Error& cause) {
    MutexLock lock(mutex_);
    if (!cause_) cause_ = cause;
    is_set_.store(true, std::memory_order_release);
    return *cause_;
  }
  std::optional<Error> get() const {
    if (!is_set_.load(std::memory_order_acquire)) return std::nullopt;
    MutexLock lock(mutex_);
    return cause_;
  }
  void throw_if_set() const {
    if (const auto cause = get()) throw Error(*cause);
  }

 private:
  std::atomic<bool> is_set_{false};
  mutable Mutex mutex_;
  std::optional<Error> cause_ TORCHSPAN_GUARDED_BY(mutex_);
};

/// What an engine is made of.
struct EngineParts {
  std::shared_ptr<Backend> control;  ///< CPU collectives of the same ranks, which only the engine uses
  c10::Device device;
  std::shared_ptr<const device::DeviceRuntime> runtime;
  std::shared_ptr<GroupFailure> failure;  ///< checked while the engine waits on the host
  /// Which rank's process has ended or left the world; nullopt if none has.
  std::function<std::optional<Error>()> departed;
  Duration timeout{};
};

/// The error for a rank that is gone; `how` may begin with its name.
Error departed_member_error(const std::string& peer, const std::string& how);

/// Waits up to 5 s until all ranks of a group end their engines. False, at once, after a failure of the group; false
/// if a rank is gone or keeps its group.
bool all_ranks_end(const EngineParts& parts) noexcept;

/// How long launched work may take to end after a rank has left the world: the rank may have done its part.
inline constexpr Duration kLeftLimit = std::chrono::seconds(2);

/// Moves and reduces tensors between the devices of a group's ranks. All methods but interrupt() are called on
/// one thread, in the same order on all ranks, with contiguous tensors on the engine's device, whose current
/// stream takes the work. They return before the device has done the work, and never block on it for longer
/// than the group's timeout; they throw when `failure` is set.
class DeviceEngine {
 public:
  virtual ~DeviceEngine() = default;
  virtual std::string name() const = 0;
  /// Whether all_reduce() and reduce_scatter() take them.
  virtual bool reduces(at::ScalarType dtype, ReduceOp reduction) const = 0;
  virtual void all_reduce(const at::Tensor& tensor, ReduceOp reduction) = 0;
  /// `part` gets this rank's part of the reduction of `tensor`, which is not changed.
  virtual void reduce_scatter(const at::Tensor& tensor, const at::Tensor& part, ReduceOp reduction) = 0;
  /// tensors[i] gets the contents that it has on rank roots[i].
  virtual void broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) = 0;
  /// sent[r] goes to rank r, whose received[this rank] it becomes.
  virtual void all_to_all(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& received) = 0;
  /// A failure of launched work that the engine knows of.
  virtual std::optional<Error> failure() { return std::nullopt; }
  /// Ends launched work, whose results are then undefined; the group has failed. May be called again; other calls then
  /// throw.
  virtual void abort() noexcept = 0;
  /// On any thread: fails a call that waits for other ranks.
  virtual void interrupt(const Error& cause) { static_cast<void>(cause); }
};

/// Collective over parts.control: makes the engine of a group.
using EngineFactory = std::function<std::unique_ptr<DeviceEngine>(EngineParts parts)>;

/// Waits on the host until the device has reached `end`. Between looks at the device, calls `check(waited)`, whose
/// errors pass through. Throws what `late` returns after `timeout`.
void wait_on_host(const device::Mark& end, Executor& executor, Duration timeout,
                  const std::function<void(Duration)>& check, const std::function<Error()>& late);

/// Reduces tensors of equal shape and dtype in their order, with LibTorch's operators, on their device. Half and
/// bfloat16 are reduced in float and rounded once.
at::Tensor reduce_in_rank_order(const std::vector<at::Tensor>& sources, ReduceOp reduction);

}  // namespace torchspan::collective
