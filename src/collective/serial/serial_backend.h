#pragma once
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/detail/core/function.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>

#include "collective/group_executor.h"
#include "collective/serial/blocking_collectives.h"
#include "collective/serial/gathers.h"
#include "collective/tensors.h"
#include "collective/world_link.h"
#include "core/api/step_part.h"

namespace torchspan::collective {

struct SerialOptions {
  GroupMembers members = {};
  int rank = 0;
  Duration timeout = std::chrono::minutes(5);
  /// Compares the ranks' calls before each operation, which costs one small gather. Other engines hang, or
  /// end the process, if ranks disagree.
  bool compare_calls = true;
  std::shared_ptr<WorldLink> world = {};  ///< may be null; a death that it reports breaks the group at once
};

/// A backend over BlockingCollectives: runs one operation at a time on its thread, and implements what the
/// engine does not support. Gathers and reduces dtypes and reductions that the engine lacks here, in the
/// order of ranks; reduces 16-bit floats as floats.
class SerialBackend final : public Backend, public WorldListener {
 public:
  static std::shared_ptr<SerialBackend> make(std::shared_ptr<Runtime> runtime,
                                             std::unique_ptr<BlockingCollectives> collectives,
                                             SerialOptions options);
  /// Fails operations that have not begun with kCancelled; waits for the running one, up to the engine's
  /// timeout.
  ~SerialBackend() override;

  std::string name() const override { return collectives_->name(); }
  int rank() const override { return options_.rank; }
  Runtime& runtime() const override { return *runtime_; }
  const std::vector<int>& ranks() const override { return options_.members.ranks; }
  std::shared_ptr<Backend> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, ReduceOp reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  Future<std::vector<at::Tensor>> rooted_all_to_all(RootedCall call, std::vector<at::Tensor> parts) override;
  Future<at::Tensor> reduce(at::Tensor tensor, int root, ReduceOp reduction) override;
  Future<std::vector<at::Tensor>> coalesced(CoalescedCall call, at::Tensor flat) override;
  std::vector<Bytes> all_gather_bytes(BytesView mine, Duration timeout) override;
  void barrier(Duration timeout) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort(const Error& cause) override;
  std::optional<Error> failure() override;
  void set_instance(std::uint64_t instance) override {
    group_number_ = group_number(options_.members.ranks, instance);
  }

  void member_died(const rendezvous::Member& member, const Error& reason) override;
  /// Only later operations fail: the member may have done its part of the running one.
  void member_left(const rendezvous::Member&) override {}
  void world_ended(const Error& reason) override;
  void world_closing() override;

 private:
  struct Job {
    std::string call;
    std::uint64_t number = 0;  ///< counts the calls of this rank, from 1
    UniqueFunction<void()> run;
    UniqueFunction<void(std::exception_ptr)> fail;
    void fail_with(const Error& cause);
  };

  SerialBackend(std::shared_ptr<Runtime> runtime, std::unique_ptr<BlockingCollectives> collectives,
                SerialOptions options);
  /// `number`, if not null, gets the call's.
  template <class T>
  Future<T> submit(std::string call, UniqueFunction<T()> body, std::uint64_t* number = nullptr);
  /// Returns the call's number.
  std::uint64_t enqueue(std::unique_ptr<Job> job);
  void run();
  void run_one(Job& job);
  /// Whether this rank leaves the group or the world: its connections end, and the other ranks report it as disconnected.
  bool is_leaving() const;
  std::optional<Error> recorded_failure();
  void compare(const std::string& call);
  /// Makes a call and waits for it for at most `timeout` (zero: no limit); breaks the group if it passes.
  template <class T>
  T submit_and_wait(Duration timeout, const char* call, UniqueFunction<T()> body);
  /// Fails the calls that have not begun; returns the number of the first of them, or the largest number.
  std::uint64_t break_with(const Error& cause);
  void stop_thread();

  at::Tensor scatter_dense(const at::Tensor& tensor, ReduceOp reduction);
  Future<std::vector<at::Tensor>> exchange(std::string line, std::vector<at::Tensor> parts);

  const std::shared_ptr<Runtime> runtime_;
  const SerialOptions options_;
  const std::unique_ptr<BlockingCollectives> collectives_;
  const Gathers gathers_;
  const std::shared_ptr<GroupExecutor> continuations_;
  const std::shared_ptr<Parker> parker_;  ///< shared with the engine, which wakes the thread
  std::atomic<std::int32_t> group_number_{group_number(options_.members.ranks)};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> dropped_{false};  ///< the last handle is gone
  Mutex mutex_;
  std::deque<std::unique_ptr<Job>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::uint64_t called_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  std::atomic<std::uint64_t> calls_{0};  ///< that the thread has begun
  Thread thread_;
};

}  // namespace torchspan::collective
