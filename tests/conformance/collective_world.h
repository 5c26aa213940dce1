#pragma once
#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <gtest/gtest.h>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchspan/collective.h>
#include <torchspan/detail/core/runtime.h>
#include <torchspan/detail/rendezvous/membership.h>

#include "tests/conformance/collective_clock.h"
#include "tests/conformance/collective_mpi.h"
#include "tests/support/processes.h"

namespace torchspan::testing {

/// Ranks as threads of this process, over real sockets and the system's clock. With several hosts, the ranks
/// claim in turn to be on one or another; with `tls`, they connect as workers of different hosts do. Under mpirun, every process is one rank of the same world.
class CollectiveWorld {
 public:
  explicit CollectiveWorld(int size, int hosts = 1, bool tls = false)
      : size_(size),
        hosts_(hosts),
        tls_(tls),
        mpi_(mpi_place()),
        secret_(mpi_ ? net::Secret::from_file(mpi_->folder + "/secret") : net::Secret::random()),
        executor_(make_executor()) {}

  /// Makes rank i claim to be on host `hosts[i]`.
  void place(std::vector<int> hosts) { placement_ = std::move(hosts); }
  /// Gives every rank a clock of its own, which the test can move forward. Call it before the ranks run.
  void make_clocks() {
    while (clocks_.size() < static_cast<std::size_t>(size_))
      clocks_.push_back(std::make_unique<MovableClock>(*executor_, ahead_));
  }
  /// Moves the clocks of all ranks of this process forward at once: no rank passes a limit while another, which it has told of
  /// that, has yet to be moved.
  void move_clocks(Duration by) { ahead_ += by.count(); }
  /// How many ranks run in this process, and whether `rank` is the first of them.
  std::size_t ranks_here() const { return mpi_ ? 1 : static_cast<std::size_t>(size_); }
  bool is_first_here(int rank) const { return mpi_ || rank == 0; }
  MovableClock& clock(int rank) { return *clocks_.at(static_cast<std::size_t>(rank)); }
  int size() const { return size_; }
  Executor& executor() { return *executor_; }

  struct Rank {
    Runtime& runtime;
    rendezvous::Membership& membership;
    int rank;
  };

  /// Runs `body` on every rank at the same time; returns what each threw, or null. Under mpirun: on this
  /// rank.
  std::vector<std::exception_ptr> try_each(std::function<void(Rank)> body) {
    std::vector<std::exception_ptr> failures(ranks_here());
    store_ = name_of_store();
    if (mpi_) {
      try {
        live(mpi_->rank, body);
      } catch (...) {
        failures[0] = std::current_exception();
      }
    } else {
      std::vector<Thread> threads;
      for (int rank = 0; rank < size_; ++rank) {
        threads.push_back(executor_->spawn("rank" + std::to_string(rank), [&, rank] {
          try {
            live(rank, body);
          } catch (...) {
            failures[rank] = std::current_exception();
          }
        }));
      }
    }
    return failures;
  }

  /// The same with a group of all ranks; rethrows the first failure.
  void run(std::function<void(collective::Group&)> body, collective::GroupOptions options = {}) {
    options.timeout = std::min<Duration>(options.timeout, std::chrono::seconds(60));
    for (const auto& failure : try_each([&](Rank self) {
           collective::Group group = make_group(self.runtime, self.membership, options);
           body(group);
         })) {
      if (failure) std::rethrow_exception(failure);
    }
  }

  /// How run() makes groups.
  std::function<collective::Group(Runtime&, rendezvous::Membership&, collective::GroupOptions)> make_group =
      [](Runtime& runtime, rendezvous::Membership& world, collective::GroupOptions options) {
        return collective::Group::make(runtime, world, std::move(options));
      };

 private:
  void live(int rank, const std::function<void(Rank)>& body) {
    Executor& executor = clocks_.empty() ? *executor_ : clock(rank);
    Runtime runtime(executor, "worker" + std::to_string(rank));
    rendezvous::MembershipOptions options;
    options.name = "worker" + std::to_string(rank);
    options.rank = rank;
    options.world_size = size_;
    options.store_address = store_;
    options.address = "unix:" + folder_.path() + "/" + options.name;
    options.timeout = std::chrono::seconds(60);
    options.dead_after = std::chrono::seconds(60);
    if (hosts_ > 1) options.host_id = "host" + std::to_string(rank % hosts_);
    if (!placement_.empty())
      options.host_id = "host" + std::to_string(placement_.at(static_cast<std::size_t>(rank)));
    net::TlsOptions tls;
    tls.dead_after = std::chrono::seconds(60);
    const auto membership =
        rendezvous::Membership::join(runtime,
                                     tls_ ? rendezvous::tls_transports(executor, secret_, tls)
                                          : rendezvous::stream_transports(executor, secret_),
                                     options);
    body({runtime, *membership, rank});
    membership->leave(executor.deadline_in(std::chrono::seconds(60)));
  }

  /// The same in all processes, because all run the same tests.
  std::string name_of_store() {
    if (tls_) {
      port_.emplace(reserve_port());
      return "tls:127.0.0.1:" + std::to_string(port_->number());
    }
    if (!mpi_) return "unix:" + folder_.path() + "/store";
    std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::replace(test.begin(), test.end(), '/', '-');
    return "unix:" + mpi_->folder + "/" + test.substr(0, 40) + std::to_string(++worlds_);
  }

  const int size_;
  const int hosts_;
  std::vector<int> placement_ = {};  ///< host by rank; empty: in turn
  const bool tls_;
  const std::optional<MpiPlace> mpi_;
  TemporaryFolder folder_;
  const net::Secret secret_;
  int worlds_ = 0;
  std::optional<ReservedPort> port_;  ///< of the store, over TLS
  std::string store_;
  const std::unique_ptr<Executor> executor_;
  std::atomic<Duration::rep> ahead_{0};                ///< what all clocks were moved forward by
  std::vector<std::unique_ptr<MovableClock>> clocks_;  ///< by rank; empty: the system's
};

}  // namespace torchspan::testing
