#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <torchspan/core/function.h>
#include <torchspan/core/mutex.h>
#include <torchspan/core/pool.h>
#include <torchspan/core/runtime.h>

#include "collective/group_host.h"
#include "collective/serial/call_line.h"
#include "collective/serial/wire.h"

namespace torchspan::collective {

struct SerialOptions {
  std::vector<int> ranks = {};           ///< of the world, by rank of the group
  std::vector<std::string> people = {};  ///< their names for messages
  int rank = 0;
  Duration timeout = std::chrono::minutes(5);
  /// Compares calls before each operation, at the price of one small gather: foreign engines hang, or end the
  /// process, where ranks disagree.
  bool compare_calls = true;
  /// Who of the ranks is known to be gone, and how; asked when the engine fails. May be empty.
  std::function<std::optional<std::string>(int rank)> gone = {};
  /// Asks the ranks (of the world), by other ways than the engine's, who else gave up on this call; returns
  /// who did not answer within a second, or nothing. May be empty.
  std::function<std::string(std::uint64_t call, std::vector<int> ranks)> roll_call = {};
};

/// A back end over a Wire: runs one operation after the other on a thread of its own, and builds what the
/// engine does not have out of what it has. Dtypes and reductions that the engine lacks are gathered and
/// reduced here, in the order of the ranks; halves are reduced as floats.
class SerialBackEnd final : public BackEnd {
 public:
  SerialBackEnd(Runtime& runtime, std::unique_ptr<Wire> wire, SerialOptions options);
  /// Fails what has not begun with kCancelled; waits for what has, which the wire's time-outs bound.
  ~SerialBackEnd() override;

  std::string name() const override { return wire_->name(); }
  int rank() const override { return options_.rank; }
  const std::vector<int>& ranks() const override { return options_.ranks; }
  std::shared_ptr<BackEnd> split(int color, int key) override;
  Future<at::Tensor> all_reduce(at::Tensor tensor, Reduction reduction) override;
  Future<at::Tensor> reduce_scatter(at::Tensor tensor, Reduction reduction) override;
  Future<std::vector<at::Tensor>> all_gather(at::Tensor tensor) override;
  Future<at::Tensor> broadcast(at::Tensor tensor, int root) override;
  Future<std::vector<at::Tensor>> all_to_all(std::vector<at::Tensor> parts) override;
  std::vector<Bytes> exchange(BytesView mine, Deadline deadline) override;
  void barrier(Deadline deadline) override;
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void abort(const Error& cause) override;

 private:
  struct Job {
    CallLine call;
    UniqueFunction<void()> run;
    UniqueFunction<void(std::exception_ptr)> fail;
  };

  template <class T>
  Future<T> submit(CallLine call, UniqueFunction<T()> body);
  void enqueue(std::unique_ptr<Job> job);
  void run();
  void run_one(Job& job);
  void compare(const CallLine& call);
  Error explain(const CallLine& call, const std::exception_ptr& exception) const;
  /// Who is gone, or else who does not answer; begins with "; ".
  std::string who_is_missing() const;
  /// Waits for a call whose caller set a deadline, past which it breaks the group.
  template <class T>
  T wait_until(Deadline deadline, const Future<T>& future, const char* call);
  void break_with(const Error& cause);
  std::optional<Error> failure();
  void throw_if_broken(const char* call);

  void reduce_dense(at::Tensor tensor, Reduction reduction);
  at::Tensor reduce_sparse(const at::Tensor& tensor, Reduction reduction);
  void reduce_gathered(at::Tensor tensor, Reduction reduction);
  std::vector<at::Tensor> gather_dense(const at::Tensor& tensor);
  std::vector<Bytes> gather_bytes(BytesView mine);

  Runtime& runtime_;
  const SerialOptions options_;
  const std::unique_ptr<Wire> wire_;
  const std::shared_ptr<GroupHost> host_;
  const std::unique_ptr<Parker> parker_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::deque<std::unique_ptr<Job>> queue_ TORCHSPAN_GUARDED_BY(mutex_);
  std::optional<Error> failure_ TORCHSPAN_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> calls_{0};  ///< that the thread began
  Thread thread_;
};

}  // namespace torchspan::collective
