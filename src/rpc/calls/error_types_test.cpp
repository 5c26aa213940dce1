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
/// Registered, but its encoding throws.
struct Stubborn : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// A result whose encoding throws.
struct Unsendable {
  int number = 0;
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

template <>
struct Wire<error_types_test::Stubborn> {
  static std::string name() { return "Stubborn"; }
  static void encode(wire::Encoder&, const error_types_test::Stubborn&) {
    throw std::runtime_error("no bytes for it");
  }
  static error_types_test::Stubborn decode(wire::Decoder&) { return error_types_test::Stubborn(""); }
};

template <>
struct Wire<error_types_test::Unsendable> {
  static std::string name() { return "Unsendable"; }
  static void encode(wire::Encoder&, const error_types_test::Unsendable& value) {
    if (value.number == 0) throw std::string("the table is locked");
    throw Error(ErrorKind::kUnsupported, "such a table cannot be sent");
  }
  static error_types_test::Unsendable decode(wire::Decoder&) { return {}; }
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

std::int64_t value_behind(RRef<std::int64_t> value) { return value.local_value(); }
constexpr Function<value_behind> kValueBehind{"value_behind"};

void refuse(std::int64_t kind) { throw Error(static_cast<ErrorKind>(kind), "come back later"); }
Task<void> refuse_elsewhere(Worker& worker, std::int64_t kind);
std::int64_t refuse_value(std::int64_t kind) {
  refuse(kind);
  return 0;
}
constexpr Function<refuse> kRefuse{"refuse"};
constexpr Function<refuse_elsewhere> kRefuseElsewhere{"refuse_elsewhere"};
constexpr Function<refuse_value> kRefuseValue{"refuse_value"};
Task<void> refuse_elsewhere(Worker& worker, std::int64_t kind) {
  co_await worker.rpc_async((worker.rank() + 1) % worker.world_size(), kRefuse, kind);
}
void throw_stubborn() { throw Stubborn("out of ink"); }
Unsendable get_unsendable(std::int64_t number) { return {static_cast<int>(number)}; }
void throw_text() { throw "plain text"; }
void throw_huge() { throw std::runtime_error(std::string(8 << 20, 'x')); }
constexpr Function<throw_stubborn> kThrowStubborn{"throw_stubborn"};
constexpr Function<get_unsendable> kGetUnsendable{"get_unsendable"};
constexpr Function<throw_text> kThrowText{"throw_text"};
constexpr Function<throw_huge> kThrowHuge{"throw_huge"};

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kInvalid, ""};
}

void on_first(int workers, const std::function<void(Worker&)>& body) {
  ClusterOptions options;
  options.workers = workers;
  options.functions.add(kTake, kTakeElsewhere, kValueBehind, kRefuse, kRefuseElsewhere, kRefuseValue);
  options.functions.add(kThrowStubborn, kGetUnsendable, kThrowText, kThrowHuge);
  options.functions.add_error<OutOfStock>("OutOfStock");
  options.functions.add_error<Stubborn>("Stubborn");
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

TEST(ErrorTypes, OfAFailedCreationReachWhoeverUsesItsReference) {
  on_first(2, [](Worker& worker) {
    const RRef<std::int64_t> late = worker.remote(1, kTake, 4);
    EXPECT_THROW(worker.rpc_sync(1, kValueBehind, late), OutOfStock) << "found by the function on the owner";
    const RRef<std::int64_t> known = worker.remote(1, kTake, 4);
    EXPECT_THROW(known.creation().wait(), OutOfStock);
    EXPECT_THROW(worker.rpc_sync(1, kValueBehind, known), OutOfStock) << "known before the call is sent";
    EXPECT_THROW(known.rpc_sync(kValueBehind), OutOfStock);
  });
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

TEST(Refusals, ReachTheCallerWithTheirKind) {
  on_first(3, [](Worker& worker) {
    for (const ErrorKind kind : {ErrorKind::kOverloaded, ErrorKind::kDenied, ErrorKind::kUnsupported}) {
      const auto number = static_cast<std::int64_t>(kind);
      const Error error = error_of([&] { worker.rpc_sync(1, kRefuse, number); });
      EXPECT_EQ(error.kind(), kind);
      EXPECT_THAT(error.what(), ::testing::HasSubstr("come back later"));
      EXPECT_EQ(error.worker(), "worker1");
      EXPECT_EQ(error.frames().size(), 1u);
      EXPECT_EQ(error_of([&] { worker.rpc_sync(0, kRefuse, number); }).kind(), kind) << "on this worker";
      EXPECT_EQ(error_of([&] { worker.remote(1, kRefuseValue, number).to_here(); }).kind(), kind);
      // The worker that was called does not refuse: its own call failed.
      const Error nested = error_of([&] { worker.rpc_sync(1, kRefuseElsewhere, number); });
      EXPECT_EQ(nested.kind(), ErrorKind::kRemoteFailure);
      EXPECT_EQ(nested.frames().size(), 2u);
    }
    for (const ErrorKind kind :
         {ErrorKind::kInvalid, ErrorKind::kDisconnected, ErrorKind::kTimedOut, ErrorKind::kCancelled}) {
      const Error error = error_of([&] { worker.rpc_sync(1, kRefuse, static_cast<std::int64_t>(kind)); });
      EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure)
          << "it would be taken for a defect or the end of this call";
    }
  });
}

TEST(ErrorTypes, WhoseEncodingThrowsLeaveTheTextOfTheException) {
  on_first(2, [](Worker& worker) {
    const Error error = error_of([&] { worker.rpc_sync(1, kThrowStubborn); });
    EXPECT_EQ(error.kind(), ErrorKind::kRemoteFailure);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("out of ink"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("'Stubborn' could not be encoded: no bytes for it"));
  });
}

TEST(Results, WhoseEncodingThrowsAreErrorsThatNameTheFunction) {
  on_first(2, [](Worker& worker) {
    const Error thrown = error_of([&] { worker.rpc_sync(1, kGetUnsendable, 0); });
    EXPECT_EQ(thrown.kind(), ErrorKind::kRemoteFailure);
    EXPECT_THAT(thrown.what(), ::testing::HasSubstr("the value that 'get_unsendable' returned could not be "
                                                    "encoded: std::string: the table is locked"));
    const Error refused = error_of([&] { worker.rpc_sync(1, kGetUnsendable, 1); });
    EXPECT_EQ(refused.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(refused.call(), "get_unsendable");
    const Error fetched = error_of([&] { worker.remote(1, kGetUnsendable, 0).to_here(); });
    EXPECT_THAT(fetched.what(), ::testing::HasSubstr("the table is locked"));
  });
}

TEST(Exceptions, KeepThrownTextsAndAreCutIfTheyAreHuge) {
  on_first(2, [](Worker& worker) {
    EXPECT_THAT(error_of([&] { worker.rpc_sync(1, kThrowText); }).what(), ::testing::HasSubstr("plain text"));
    const Error huge = error_of([&] { worker.rpc_sync(1, kThrowHuge); });
    EXPECT_LT(std::string(huge.what()).size(), 2 * kMaxErrorText);
    EXPECT_THAT(huge.what(), ::testing::HasSubstr(" more bytes)"));
  });
}

}  // namespace
}  // namespace torchspan::error_types_test
