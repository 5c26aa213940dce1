#pragma once
#include <ATen/ATen.h>

#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "tests/parity/rpc_faults.h"

namespace torchspan {

struct Unreadable {
  std::int64_t value = 0;
};
template <>
struct Wire<Unreadable> {
  static std::string name() { return "Unreadable"; }
  static void encode(wire::Encoder& encoder, const Unreadable& value) { wire::encode(encoder, value.value); }
  static Unreadable decode(wire::Decoder& decoder) {
    wire::decode<std::int64_t>(decoder);
    throw Error(ErrorKind::kInvalid, "this cannot be read");
  }
};

/// Helpers for the regression tests of remote calls.
namespace defects {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ClusterOptions;
using testing::nap;
using testing::SimCluster;
using testing::state_of;
using testing::with_state;
using testing::WorkerPlan;
using testing::world_of;

struct Marks {
  std::atomic<int> begun{0};
  std::atomic<int> stopped{0};
};
struct Cell {
  std::int64_t value = 7;
  std::int64_t get() const { return value; }
};
inline void sleep_ms(Worker& worker, std::int64_t ms) { nap(worker, milliseconds(ms)); }
inline void mark(Worker& worker) { ++state_of<Marks>(worker).begun; }
inline RRef<Cell> give_back(Worker& worker, const RRef<Cell>& cell, std::int64_t ms) {
  sleep_ms(worker, ms);
  return cell;
}
struct Keeper {
  explicit Keeper(const RRef<Cell>& kept) : kept(kept) {}
  RRef<Cell> kept;
};
inline RRef<Cell> kept_late(Worker& worker, const RRef<Keeper>& keeper, std::int64_t ms) {
  sleep_ms(worker, ms);
  return keeper.local_value().kept;
}
inline RRef<Cell> make_late(Worker& worker, std::int64_t ms) {
  sleep_ms(worker, ms);
  return RRef<Cell>(worker, Cell{});
}
inline void take(const RRef<Cell>&, const at::Tensor&) {}
inline void work(Worker& worker) {
  Marks& marks = state_of<Marks>(worker);
  ++marks.begun;
  const auto stop = worker.current_call()->stop;
  for (int i = 0; i < 20000; ++i) {
    if (stop.stop_requested()) {
      ++marks.stopped;
      throw std::runtime_error("stop requested");
    }
    nap(worker, milliseconds(10));
  }
}
void delegate_with_own_token(Worker& worker);
inline Unreadable unreadable() { return {}; }

inline constexpr Function<sleep_ms> kSleepMs{"sleep_ms"};
inline constexpr Function<mark> kMark{"mark"};
inline constexpr Function<give_back> kGiveBack{"give_back"};
inline constexpr Function<make_late> kMakeLate{"make_late"};
inline constexpr Function<take> kTake{"take"};
inline constexpr Function<work> kWork{"work"};
inline constexpr Function<delegate_with_own_token> kDelegate{"delegate_with_own_token"};
inline constexpr Function<unreadable> kUnreadable{"unreadable"};
inline constexpr Class<Keeper, RRef<Cell>> kKeeper{"Keeper"};
inline constexpr Function<kept_late> kKeptLate{"kept_late"};
inline constexpr Class<Cell> kCell{"Cell"};
inline constexpr Function<&Cell::get> kGet{"Cell.get"};

inline void delegate_with_own_token(Worker& worker) {
  std::stop_source mine;
  worker.with({.stop = mine.get_token()}).rpc_sync(2, kWork);
}

inline ClusterOptions world(Marks& marks, int workers) {
  ClusterOptions options = with_state(
      world_of(workers, FunctionTable().add(kSleepMs, kMark, kGiveBack, kMakeLate, kTake, kWork, kDelegate,
                                            kUnreadable, kCell, kGet, kKeeper, kKeptLate)),
      marks);
  options.shutdown_limit = std::chrono::minutes(2);
  return options;
}
inline void first(const ClusterOptions& options, const std::function<void(Worker&, SimCluster&)>& body) {
  SimCluster cluster(options);
  try {
    cluster.run([&](Worker& worker) {
      if (worker.rank() == 0) body(worker, cluster);
    });
  } catch (const std::exception& failure) {
    ADD_FAILURE() << failure.what();
  }
}

}  // namespace defects
}  // namespace torchspan
