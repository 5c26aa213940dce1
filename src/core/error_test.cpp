#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <set>
#include <stdexcept>

#include <torchspan/core/error.h>

namespace torchspan::error_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

struct NotAnException {};
struct OwnException : std::runtime_error {
  using std::runtime_error::runtime_error;
};

TEST(Error, ContainsKindAndMessageWhenNothingElseIsKnown) {
  EXPECT_STREQ(Error(ErrorKind::kDenied, "wrong secret").what(), "denied: wrong secret");
}

TEST(Error, NamesCallWorkerAndTimeIfKnown) {
  const auto error = [] { return Error(ErrorKind::kTimedOut, "no reply"); };
  EXPECT_STREQ(error().with_call("add").what(), "timed out: no reply (call 'add')");
  EXPECT_STREQ(error().with_worker("w1").what(), "timed out: no reply (worker 'w1')");
  EXPECT_STREQ(error().with_elapsed(1500ms).what(), "timed out: no reply (after 1.500 s)");
  EXPECT_STREQ(error().with_worker("w1").with_elapsed(2ms).with_call("add").what(),
               "timed out: no reply (call 'add', worker 'w1', after 0.002 s)");
  EXPECT_STREQ(error().with_elapsed(Duration::zero()).what(), "timed out: no reply");
}

TEST(Error, ListsTheHopsInTheOrderTheyWereAdded) {
  const Error error = Error(ErrorKind::kRemoteFailure, "the call threw")
                          .with_call("train")
                          .with_frame({"w2", "load", "std::runtime_error", "no such file"})
                          .with_frame({"w1", "train", "torchspan::Error", "the call threw"});
  EXPECT_STREQ(error.what(),
               "remote failure: the call threw (call 'train')\n"
               "  in 'load' on worker 'w2': std::runtime_error: no such file\n"
               "  in 'train' on worker 'w1': torchspan::Error: the call threw");
  ASSERT_EQ(error.frames().size(), 2u);
  EXPECT_EQ(error.frames().front().worker, "w2");
}

TEST(Error, KeepsItsPartsWhenThrownAndCopied) {
  try {
    throw Error(ErrorKind::kOverloaded, "full").with_worker("w3").with_call("push").with_elapsed(3s);
  } catch (const Error& error) {
    const Error copy = error;  // NOLINT(performance-unnecessary-copy-initialization): what is tested
    EXPECT_EQ(copy.kind(), ErrorKind::kOverloaded);
    EXPECT_EQ(copy.message(), "full");
    EXPECT_EQ(copy.worker(), "w3");
    EXPECT_EQ(copy.call(), "push");
    EXPECT_EQ(copy.elapsed(), 3s);
    EXPECT_STREQ(copy.what(), error.what());
  }
}

TEST(ErrorKind, HasOneNamePerNumberAndOneForUnknownNumbers) {
  std::set<std::string_view> names;
  for (std::uint8_t number = 1; number <= 8; ++number) {
    names.insert(to_string(static_cast<ErrorKind>(number)));
  }
  EXPECT_EQ(names.size(), 8u);
  EXPECT_EQ(names.count("unknown kind"), 0u);
  EXPECT_EQ(to_string(static_cast<ErrorKind>(0)), "unknown kind");
  EXPECT_EQ(to_string(static_cast<ErrorKind>(9)), "unknown kind");
}

TEST(ErrorKind, KeepsTheNumbersThatTravelOnTheWire) {
  EXPECT_EQ(static_cast<int>(ErrorKind::kInvalid), 1);
  EXPECT_EQ(static_cast<int>(ErrorKind::kRemoteFailure), 2);
  EXPECT_EQ(static_cast<int>(ErrorKind::kDisconnected), 3);
  EXPECT_EQ(static_cast<int>(ErrorKind::kTimedOut), 4);
  EXPECT_EQ(static_cast<int>(ErrorKind::kCancelled), 5);
  EXPECT_EQ(static_cast<int>(ErrorKind::kOverloaded), 6);
  EXPECT_EQ(static_cast<int>(ErrorKind::kDenied), 7);
  EXPECT_EQ(static_cast<int>(ErrorKind::kUnsupported), 8);
}

TEST(Describe, GivesTheDynamicTypeAndTheText) {
  const auto description = describe(std::make_exception_ptr(OwnException("out of ink")));
  EXPECT_THAT(description.type, HasSubstr("OwnException"));
  EXPECT_EQ(description.text, "out of ink");
  EXPECT_EQ(describe(std::make_exception_ptr(std::out_of_range("3"))).type, "std::out_of_range");
}

TEST(Describe, NamesTheTypeOfAThrownNonException) {
  EXPECT_EQ(describe(std::make_exception_ptr(7)).type, "int");
  EXPECT_THAT(describe(std::make_exception_ptr(NotAnException())).type, HasSubstr("NotAnException"));
}

TEST(Describe, AcceptsANullPointer) {
  EXPECT_EQ(describe(nullptr).type, "no exception");
  EXPECT_EQ(to_error(nullptr).kind(), ErrorKind::kInvalid);
}

TEST(ToError, GivesAnErrorBackUnchangedAndWrapsOthers) {
  const Error original =
      Error(ErrorKind::kDisconnected, "gone").with_worker("w1").with_frame({"w1", "f", "T", "t"});
  const Error same = to_error(std::make_exception_ptr(original));
  EXPECT_EQ(same.kind(), ErrorKind::kDisconnected);
  EXPECT_STREQ(same.what(), original.what());
  EXPECT_EQ(same.frames().size(), 1u);

  const Error wrapped = to_error(std::make_exception_ptr(std::out_of_range("index 9")));
  EXPECT_EQ(wrapped.kind(), ErrorKind::kInvalid);
  EXPECT_EQ(wrapped.message(), "std::out_of_range: index 9");
}

struct SilentException : std::exception {
  const char* what() const noexcept override { return nullptr; }
};

std::exception_ptr nested(const std::function<void()>& inner, const std::string& outer) {
  try {
    try {
      inner();
    } catch (...) {
      std::throw_with_nested(OwnException(outer));
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

TEST(Describe, GivesThrownStringsAndExceptionsWithoutText) {
  EXPECT_EQ(describe(std::make_exception_ptr(std::string("no ink"))).text, "no ink");
  EXPECT_EQ(describe(std::make_exception_ptr(static_cast<const char*>("no paper"))).text, "no paper");
  EXPECT_EQ(describe(std::make_exception_ptr(static_cast<const char*>(nullptr))).text, "a null pointer");
  EXPECT_THAT(describe(std::make_exception_ptr(SilentException())).text, HasSubstr("what() is null"));
  EXPECT_THAT(to_error(std::make_exception_ptr(std::string("no ink"))).message(), HasSubstr("no ink"));
}

TEST(Describe, ListsTheCausesNestedInAnException) {
  const auto failure = nested(
      [] {
        std::rethrow_exception(nested([] { throw std::out_of_range("row 9"); }, "cannot read the table"));
      },
      "cannot load the shard");
  const auto description = describe(failure);
  EXPECT_THAT(description.type, ::testing::EndsWith("OwnException"));
  EXPECT_THAT(description.text, ::testing::StartsWith("cannot load the shard, caused by "));
  EXPECT_THAT(description.text, HasSubstr("cannot read the table, caused by std::out_of_range: row 9"));
  EXPECT_EQ(to_error(failure).kind(), ErrorKind::kInvalid);
  EXPECT_THAT(to_error(failure).message(), HasSubstr("row 9"));
}

TEST(ToError, KeepsTheTextsAroundANestedErrorOfThisWorker) {
  const auto failure =
      nested([] { throw Error(ErrorKind::kOverloaded, "the queue is full").with_call("put"); },
             "cannot store the page");
  const Error error = to_error(failure);
  EXPECT_EQ(error.kind(), ErrorKind::kOverloaded);
  EXPECT_EQ(error.call(), "put");
  EXPECT_THAT(error.message(), HasSubstr("cannot store the page, caused by the queue is full"));
  const auto remote = nested(
      [] {
        throw Error(ErrorKind::kRemoteFailure, "it threw").with_frame({"w1", "f", "T", "t"});
      },
      "outer");
  EXPECT_EQ(to_error(remote).message(), "it threw");
  EXPECT_EQ(describe(remote).text, "outer");
}

TEST(Error, CutsLongTextsBetweenCharacters) {
  const std::string long_text(8 << 20, 'x');
  const Error error = Error(ErrorKind::kInvalid, long_text).with_frame({"w1", "f", "T", long_text});
  const std::string end = "… (" + std::to_string(long_text.size() - kMaxErrorText) + " more bytes)";
  EXPECT_EQ(error.message().size(), kMaxErrorText + end.size());
  EXPECT_THAT(error.message(), ::testing::EndsWith(end));
  EXPECT_THAT(error.frames().at(0).text, ::testing::EndsWith(end));
  EXPECT_LT(std::string(error.what()).size(), 3 * kMaxErrorText);
  EXPECT_EQ(shortened("äöü", 6), "äöü");
  EXPECT_EQ(shortened("äöü", 5), "äö… (2 more bytes)");
  EXPECT_EQ(shortened("äöü", 4), "äö… (2 more bytes)");
  EXPECT_EQ(shortened("\x80\x80\x80\x80\x80\x80", 5), "\x80\x80\x80\x80\x80… (1 more bytes)");
}

}  // namespace
}  // namespace torchspan::error_test
