#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <torchspan/collective.h>
#include <torchspan/detail/core/owner_process.h>
#include <torchspan/detail/core/pool.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>
#include <torchspan/detail/rpc/service.h>
#include <torchspan/net.h>
#include <torchspan/rendezvous.h>

#include "core/api/observation.h"

namespace torchspan::python {

/// Text as the program's store holds it.
inline std::vector<std::uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }
inline std::string text_of(const std::vector<std::uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// Where torch.distributed places this process in its job.
struct Place {
  int rank = 0;             ///< rendezvous::kAnyRank in an open world: the next free one
  int size = 1;             ///< rendezvous::kOpenWorld: workers join and leave at any time
  std::string master_host;  ///< where the program's store runs; used if the ranks are on several hosts
  std::string name = {};    ///< of the worker; empty: TORCHSPAN_NAME, or "worker<rank>"
  /// Whether a worker that comes after the end of an open world is a world of one; else it fails.
  bool alone_after_end = false;
};

/// What a process needs to join the others of its job. They find each other through the program's store, which
/// carries their hosts and the address of rank 0, and nothing secret: it authenticates nobody. Without such a store they meet
/// where TorchSpan's own launcher and C++ programs do, at MASTER_ADDR and MASTER_PORT.
class Job {
 public:
  /// Waits until rank 0 has decided whether all are on one host. Throws Error, and what the store throws. If `store` is
  /// null, the environment gives what is negative in `place`.
  Job(c10d::Store* store, Place place, Duration timeout);

  const std::shared_ptr<Runtime>& runtime() const { return runtime_; }
  const rendezvous::WorkerEnvironment& environment() const { return environment_; }
  const net::NetworkOptions& network() const { return network_; }
  /// The job's secret; empty in a world of one.
  const net::Secret& secret() const { return secret_; }
  /// The environment variables, with torch.distributed's values in place of the launcher's.
  const rendezvous::Environment& variables() const { return variables_; }
  const Place& place() const { return place_; }

  /// Joins; returns when all ranks of a fixed world have joined. `address`: where peers reach this worker. `listen`:
  /// WorkerNetwork::store_listen().
  std::unique_ptr<rendezvous::Membership> join(const std::string& address = {});
  /// Makes the worker's service with the transport that the job needs; does not join.
  /// Returns it and the address where peers reach it.
  std::pair<std::unique_ptr<rpc::WorkerService>, std::string> make_service(
      rpc::ServiceOptions options, FunctionTable functions,
      std::vector<std::unique_ptr<rpc::Extension>> extensions);
  /// The same, joins, and begins to serve.
  std::unique_ptr<rpc::WorkerService> start(rpc::ServiceOptions options, FunctionTable functions,
                                            std::vector<std::unique_ptr<rpc::Extension>> extensions);
  /// Writes and serves what the environment asks for. If another part of the process serves its metrics, this one does not.
  std::unique_ptr<Observation> observe(const std::string& name) const;
  /// Rank 0 of an open world tells workers that come later that it has ended; all others do nothing.
  static void end_open_world(c10d::Store& store, const rendezvous::Membership& membership);
  /// Runs what precedes join(). If rank 0 fails, the others, which wait for its address, get the reason.
  template <class F>
  auto or_tell_others(F&& body) {
    try {
      return body();
    } catch (const Error& error) {
      tell_others(error);
      throw;
    }
  }

 private:
  /// The world size and the host of this process.
  std::string presence() const;
  /// Throws kInvalid if another rank, of which `present` is the presence(), is in a world of another size.
  void check_size(int rank, const std::string& present) const;
  /// Waits for it in the program's store. Throws kTimedOut that names the ranks that have not come.
  std::string value_of(const std::string& key);
  /// Rank 0's address in the program's store, or why there is none. Waits while it is that of a world whose ranks have all
  /// joined; throws kTimedOut then, or kInvalid if that world has another size.
  std::string await_address();
  void meet();
  void meet_rank_0();
  void forget_meeting();
  std::unique_ptr<rendezvous::Membership> join_once(const std::string& address, Duration timeout);
  void read_variables();
  void make_environment();
  void tell_others(const Error& error);

  c10d::Store* const store_;
  const Duration timeout_;
  Place place_;
  bool one_host_ = true;
  std::string id_;       ///< of this job
  std::string address_;  ///< of rank 0's store; empty on rank 0
  rendezvous::Environment variables_;
  rendezvous::WorkerEnvironment environment_;
  net::NetworkOptions network_;
  net::Secret secret_;
  std::shared_ptr<Runtime> runtime_;
  FunctionTable functions_;  ///< that workers of C++ compare with theirs
};

/// The processes of one torch.distributed job: their membership, and the runtime on which their groups run. Thread-safe.
class World {
 public:
  /// Joins; returns when all ranks have joined. Throws Error as Membership::join().
  static std::shared_ptr<World> join(c10d::Store& store, const Place& place, Duration timeout);
  ~World();
  World(const World&) = delete;

  /// Collective over `options.ranks`.
  collective::Group make_group(collective::GroupOptions options);
  rendezvous::Membership& membership() { return *membership_; }
  Runtime& runtime() { return *runtime_; }
  const std::shared_ptr<Runtime>& shared_runtime() const { return runtime_; }
  /// Runs `job` on a thread that may block, as callbacks of c10d's futures do.
  void post(UniqueFunction<void()> job);
  /// Leaves, so that the other ranks see no death. Rank 0 waits for the others until the deadline. Later calls of
  /// groups throw kCancelled. Idempotent.
  void leave(Duration timeout);

 private:
  World(c10d::Store& store, const Place& place, Duration timeout);

  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<rendezvous::Membership> membership_;
  std::unique_ptr<Observation> observation_;
  std::shared_ptr<Pool> callbacks_;
};

/// Runs `body` on a thread. One that has not ended when this object does is abandoned, with all that `body` holds.
class Background {
 public:
  Background(Executor& executor, const std::string& name, std::function<void()> body);
  ~Background();
  Background(const Background&) = delete;

  /// Whether it has ended; may return earlier than at the deadline.
  bool wait_until(Deadline deadline);
  /// After its end. Throws what `body` threw.
  void finish();

 private:
  struct State {
    std::unique_ptr<Parker> parker;
    std::exception_ptr error;
    std::atomic<bool> ended{false};
  };
  const std::shared_ptr<State> state_;
  Thread thread_;
};

/// Runs `stop` for the worker at the end of the program. After a few seconds, functions that still run are abandoned.
void stop_before_exit(Runtime& runtime, const std::shared_ptr<rpc::WorkerBackend>& backend,
                      std::function<void()> stop);

}  // namespace torchspan::python
