#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torchspan/rpc/worker.h>

#include "tests/support/cluster.h"

namespace torchspan::error_types_test {
namespace {

struct OutOfStock : std::runtime_error {
  OutOfStock(std::string item, std::int64_t left)
      : std::runtime_error("only " + std::to_string(left) + " of " + item),
        item(std::move(item)),
        left(left) {}
  std::string item;
  std::int64_t left;
};
struct Unregistered : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

}  // namespace torchspan::error_types_test

namespace torchspan {

template <>
struct Wire<error_types_test::OutOfStock> {
  static std::string name() { return "OutOfStock"; }
  static void encode(wire::Encoder& encoder, const error_types_test::OutOfStock& value) {
    wire::encode(encoder, value.item);
    wire::encode(encoder, value.left);
  }
  static error_types_test::OutOfStock decode(wire::Decoder& decoder) {
    auto item = wire::decode<std::string>(decoder);
    return {std::move(item), wire::decode<std::int64_t>(decoder)};
  }
};

}  // namespace torchspan

namespace torchspan::error_types_test {
namespace {

using testing::ClusterOptions;
using testing::SimCluster;

std::int64_t take(std::int64_t how_many) {
  if (how_many > 3) throw OutOfStock("ink", 3);
  if (how_many < 0) throw Unregistered("negative");
  return how_many;
}
Task<std::int64_t> take_elsewhere(Worker& worker, std::int64_t how_many);
constexpr Function<take> kTake{"take"};
constexpr Function<take_elsewhere> kTakeElsewhere{"take_elsewhere"};
Task<std::int64_t> take_elsewhere(Worker& worker, std::int64_t how_many) {
  co_return co_await worker.rpc_async((worker.rank() + 1) % worker.world_size(), kTake, how_many);
}

void on_first(int workers, const std::function<void(Worker&)>& body) {
  ClusterOptions options;
  options.workers = workers;
  options.functions.add(kTake, kTakeElsewhere);
  options.functions.add_error<OutOfStock>("OutOfStock");
  SimCluster world(std::move(options));
  world.run([&](Worker& worker) {
    if (worker.rank() == 0) body(worker);
  });
}

void expect_out_of_stock(const std::function<void()>& body, std::size_t hops) {
  try {
    body();
    FAIL() << "nothing was thrown";
  } catch (const OutOfStock& error) {
    EXPECT_EQ(error.item, "ink");
    EXPECT_EQ(error.left, 3);
    EXPECT_STREQ(error.what(), "only 3 of ink");
    try {
      std::rethrow_if_nested(error);
      FAIL() << "no remote Error is nested";
    } catch (const Error& remote_error) {
      EXPECT_EQ(remote_error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_EQ(remote_error.worker(), "worker1");
      EXPECT_EQ(remote_error.frames().size(), hops);
      EXPECT_THAT(remote_error.what(), ::testing::HasSubstr("only 3 of ink"));
    }
  }
}

// peer: rpc/more user exceptions arrive with their original type: better
TEST(ErrorTypes, AreRebuiltOnTheCaller) {
  on_first(2, [](Worker& worker) {
    expect_out_of_stock([&] { worker.rpc_sync(1, kTake, 4); }, 1);
    expect_out_of_stock(
        [&] { worker.rpc_async(1, kTake, 4).then([](auto done) { return done.wait(); }).wait(); }, 1);
    expect_out_of_stock([&] { worker.remote(1, kTake, 4).to_here(); }, 1);
  });
}

// peer: rpc/more user exceptions arrive with their original type
TEST(ErrorTypes, CrossSeveralWorkers) {
  on_first(3, [](Worker& worker) { expect_out_of_stock([&] { worker.rpc_sync(1, kTakeElsewhere, 4); }, 2); });
}

TEST(ErrorTypes, LeaveUnregisteredTypesUnchanged) {
  on_first(2, [](Worker& worker) {
    try {
      worker.rpc_sync(1, kTake, -1);
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
      EXPECT_EQ(error.frames().at(0).text, "negative");
    }
    EXPECT_EQ(worker.rpc_sync(1, kTake, 2), 2);
  });
}

TEST(ErrorTypes, FallBackToTheRemoteError) {
  rpc::ErrorTypes types, none;
  types.add<OutOfStock>("OutOfStock");
  const auto remote_error = std::make_exception_ptr(Error(ErrorKind::kRemoteFailure, "the remote error"));
  const auto encoded = types.encode(std::make_exception_ptr(OutOfStock("paper", 1)));
  ASSERT_TRUE(encoded);
  EXPECT_EQ(types.encode(std::make_exception_ptr(Unregistered("x"))), std::nullopt);
  EXPECT_THROW(std::rethrow_exception(types.rebuild(*encoded, remote_error)), OutOfStock);
  EXPECT_EQ(none.rebuild(*encoded, remote_error), remote_error);
  for (std::size_t size = 0; size < encoded->size(); ++size) {
    EXPECT_EQ(types.rebuild(BytesView(*encoded).first(size), remote_error), remote_error) << size << " bytes";
  }
  EXPECT_THROW(types.add<OutOfStock>("OutOfStock"), Error);
}

}  // namespace
}  // namespace torchspan::error_types_test
