// RRefs inside any value that can be sent: structs, containers, each other; through every worker and back.
#include <map>
#include <optional>
#include <tuple>
#include <variant>

#include <ATen/core/ivalue.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>

#include "tests/parity/rpc_world.h"

namespace torchspan::rpc_rref_nesting {

/// Counts its instances; cannot be sent.
struct Plank {
  Plank(int& alive, std::int64_t length) : alive(&alive), length(length) { ++alive; }
  Plank(Plank&& other) noexcept : alive(std::exchange(other.alive, nullptr)), length(other.length) {}
  ~Plank() {
    if (alive != nullptr) --*alive;
  }
  int* alive;
  std::int64_t length;
};
struct Box {
  std::string label;
  RRef<std::int64_t> number;
  std::map<std::string, std::vector<RRef<at::Tensor>>> tensors;
  std::optional<RRef<Plank>> plank;
  std::tuple<std::int64_t, std::variant<double, RRef<std::int64_t>>> either;
  RRef<std::int64_t> empty;
};
struct Load {
  std::vector<Box> boxes;
};

}  // namespace torchspan::rpc_rref_nesting

namespace torchspan {

template <>
struct Wire<rpc_rref_nesting::Box>
    : WireStruct<rpc_rref_nesting::Box, "Box", &rpc_rref_nesting::Box::label, &rpc_rref_nesting::Box::number,
                 &rpc_rref_nesting::Box::tensors, &rpc_rref_nesting::Box::plank,
                 &rpc_rref_nesting::Box::either, &rpc_rref_nesting::Box::empty> {};
template <>
struct Wire<rpc_rref_nesting::Load>
    : WireStruct<rpc_rref_nesting::Load, "Load", &rpc_rref_nesting::Load::boxes> {};

}  // namespace torchspan

namespace torchspan::rpc_rref_nesting {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

std::int64_t next_number(std::int64_t number) { return number + 1; }
at::Tensor filled(double value) { return at::full({2, 2}, value, at::kDouble); }
Plank make_plank(Worker& worker, std::int64_t length) { return Plank(state_of<int>(worker), length); }
std::int64_t length_of(const RRef<Plank>& plank) { return plank.local_value().length; }
/// Checks everything, and sends it on the given number of times.
std::int64_t unload(Worker& worker, const Load& load, std::int64_t hops);
Load same_load(const Load& load) { return load; }
RRef<std::int64_t> wrap(const RRef<std::int64_t>& inner) { return inner; }

constexpr Function<next_number> kNextNumber{"next_number"};
constexpr Function<filled> kFilled{"filled"};
constexpr Function<make_plank> kMakePlank{"make_plank"};
constexpr Function<length_of> kLengthOf{"length_of"};
constexpr Function<unload> kUnload{"unload"};
constexpr Function<same_load> kSameLoad{"same_load"};
constexpr Function<wrap> kWrap{"wrap"};

void expect_confirmed(const RRefBase& rref) {
  EXPECT_TRUE(rref.confirmed_by_owner()) << rref.str() << ": a function starts when its references are known";
}

void check(const Box& box) {
  expect_confirmed(box.number);
  EXPECT_EQ(box.number.to_here(), 8);
  ASSERT_EQ(box.tensors.at("weights").size(), 3u);
  for (const auto& tensor : box.tensors.at("weights")) {
    expect_confirmed(tensor);
    EXPECT_TRUE(at::equal(tensor.to_here(), filled(0.5)));
  }
  ASSERT_TRUE(box.plank);
  expect_confirmed(*box.plank);
  EXPECT_EQ(box.plank->rpc_sync(kLengthOf), 12);
  EXPECT_EQ(std::get<RRef<std::int64_t>>(std::get<1>(box.either)).to_here(), 8);
  EXPECT_FALSE(box.empty.valid());
}

std::int64_t unload(Worker& worker, const Load& load, std::int64_t hops) {
  for (const Box& box : load.boxes) check(box);
  if (hops == 0) return static_cast<std::int64_t>(load.boxes.size());
  return worker.rpc_sync((worker.rank() + 1) % worker.world_size(), kUnload, load, hops - 1);
}

ClusterOptions world(int& alive) {
  return with_state(world_of(4, FunctionTable().add(kNextNumber, kFilled, kMakePlank, kLengthOf, kUnload,
                                                    kSameLoad, kWrap)),
                    alive);
}

/// References to values of every worker, including this one.
Load make_load(Worker& worker) {
  Load load;
  for (int owner = 0; owner < worker.world_size(); ++owner) {
    Box box{.label = "of " + std::to_string(owner),
            .number = worker.remote(owner, kNextNumber, 7),
            .tensors = {},
            .plank = worker.remote(owner, kMakePlank, 12),
            .either = {},
            .empty = {}};
    for (std::uint32_t i = 0; i < 3; ++i)
      box.tensors["weights"].push_back(worker.remote((owner + i) % worker.world_size(), kFilled, 0.5));
    box.either = {1, box.number};
    load.boxes.push_back(std::move(box));
  }
  return load;
}

// peer: rpc_test.py/rref (documented) RRefs inside other values: same: in any struct and container that can
//   be sent
TEST(RpcConformance, RrefsInStructsAndContainersPassThroughAllWorkersAndReturn) {
  int alive = 0;
  on_first(world(alive), [&](Worker& worker) {
    {
      const Load load = make_load(worker);
      EXPECT_EQ(worker.rpc_sync("worker1", kUnload, load, 8), 4);
      EXPECT_EQ(alive, 4);
    }
    nap(worker, std::chrono::seconds(1));
    EXPECT_EQ(alive, 0) << "every value ends with its last reference";
    EXPECT_TRUE(worker.debug().rrefs().empty());
  });
}

// peer: rpc_test.py/rref (documented) RRefs inside other values
TEST(RpcConformance, RrefsInStructsAndContainersComeBackAsResults) {
  int alive = 0;
  on_first(world(alive), [&](Worker& worker) {
    for (const char* by : {"worker0", "worker1", "worker3"}) {
      const Load back = worker.rpc_sync(by, kSameLoad, make_load(worker));
      for (const Box& box : back.boxes) {
        box.plank->creation().wait();
        for (const auto& tensor : box.tensors.at("weights")) tensor.creation().wait();
        box.number.creation().wait();
        check(box);
      }
    }
    nap(worker, std::chrono::seconds(1));
    EXPECT_EQ(alive, 0);
  });
}

// peer: rpc_test.py/rref (documented) RRefs inside other values
TEST(RpcConformance, AnRrefMayBeTheValueOfAnother) {
  int alive = 0;
  on_first(world(alive), [&](Worker& worker) {
    const RRef<std::int64_t> inner = worker.remote("worker1", kNextNumber, 7);
    const RRef<RRef<std::int64_t>> outer = worker.remote("worker2", kWrap, inner);
    const RRef<RRef<std::int64_t>> here(worker, inner);
    EXPECT_EQ(outer.to_here().to_here(), 8);
    EXPECT_EQ(here.local_value().to_here(), 8);
  });
}

}  // namespace
}  // namespace torchspan::rpc_rref_nesting
