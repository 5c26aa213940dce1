// libtorchspan.so as programs use it: this program links neither a static library of a room nor their private headers.
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include <ATen/ATen.h>

#include <torchspan/torchspan.h>

namespace torchspan::shared_library_test {

struct OutOfStock : std::runtime_error {
  OutOfStock() : std::runtime_error("out of stock") {}
  std::string item;
};
struct Shape {
  virtual ~Shape() = default;
  virtual double area() const = 0;
};
struct Square final : Shape {
  double area() const override { return 9; }
};

}  // namespace torchspan::shared_library_test

template <>
struct torchspan::Wire<torchspan::shared_library_test::OutOfStock>
    : torchspan::WireStruct<torchspan::shared_library_test::OutOfStock, "OutOfStock",
                            &torchspan::shared_library_test::OutOfStock::item> {};

namespace torchspan::shared_library_test {
namespace {

using ::testing::HasSubstr;

int order(std::string item) {
  OutOfStock error;
  error.item = std::move(item);
  throw error;
}
std::shared_ptr<Square> square() { return std::make_shared<Square>(); }
double area(const RRef<std::shared_ptr<Square>>& shape) { return shape.local_value()->area(); }
at::Tensor twice(const at::Tensor& x) { return x * 2; }

inline constexpr Function<order> kOrder{"order"};
inline constexpr Function<square> kSquare{"square"};
inline constexpr Function<area> kArea{"area"};
inline constexpr Function<&Shape::area> kShapeArea{"Shape.area"};
inline constexpr Function<twice> kTwice{"twice"};

class SharedLibrary : public ::testing::Test {
 protected:
  static FunctionTable functions() {
    FunctionTable table;
    table.add(kOrder, kSquare, kArea, kShapeArea, kTwice).add_error<OutOfStock>("OutOfStock");
    return table;
  }
  static WorkerOptions options() {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
      unsetenv(name);
    return WorkerOptions::from_env();
  }

  Session session_{options(), functions()};
  Worker& worker_ = session_.worker();
  const std::string self_ = worker_.name();
};

TEST_F(SharedLibrary, ThrowsErrorsThatProgramsCatchByType) {
  try {
    static_cast<void>(worker_.rpc_sync("nobody", kTwice, at::ones(1)));
    FAIL() << "a call to an unknown worker returned";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalid);
    EXPECT_EQ(typeid(error), typeid(Error));
    EXPECT_THAT(error.what(), HasSubstr("nobody"));
  }
}

TEST_F(SharedLibrary, LibraryCodeCatchesExceptionsOfTheProgram) {
  try {
    throw_invalid("from the library");
  } catch (const std::exception&) {
    EXPECT_EQ(to_error(std::current_exception()).message(), "from the library");
  }
  const auto thrown = std::make_exception_ptr(Error(ErrorKind::kOverloaded, "from the program"));
  EXPECT_EQ(to_error(thrown).kind(), ErrorKind::kOverloaded);
}

TEST_F(SharedLibrary, ExceptionTypesOfTheProgramReachTheCaller) {
  try {
    static_cast<void>(worker_.rpc_sync(self_, kOrder, std::string("lamp")));
    FAIL() << "the call returned";
  } catch (const OutOfStock& error) {
    EXPECT_EQ(error.item, "lamp");
    const auto* nested = dynamic_cast<const std::nested_exception*>(&error);
    ASSERT_NE(nested, nullptr);
    EXPECT_THROW(nested->rethrow_nested(), Error);
  }
}

TEST_F(SharedLibrary, FindsObjectsOfTheProgramByTypeAndByBase) {
  const auto shape = worker_.remote(self_, kSquare);
  EXPECT_EQ(worker_.rpc_sync(self_, kArea, shape), 9);
  EXPECT_EQ(shape.rpc_sync(kShapeArea), 9);
}

// Extensions are found by their type_info, which both sides of the boundary compute.
TEST_F(SharedLibrary, FindsExtensionsThatTheLibraryAdded) {
  EXPECT_NO_THROW(static_cast<void>(worker_.extension<autograd::AutogradExtension>()));
  const at::Tensor x = at::ones({3}, at::kDouble).requires_grad_();
  autograd::Context context(session_);
  context.backward(worker_.rpc_sync(self_, kTwice, x).sum());
  const auto gradients = context.gradients();
  ASSERT_EQ(gradients.size(), 1U);
  EXPECT_TRUE(at::equal(gradients.front().gradient, at::full({3}, 2, at::kDouble)));
}

// A scope of the program in the library's thread-local state: both must see one variable.
TEST_F(SharedLibrary, SharesThreadLocalState) {
  EXPECT_FALSE(autograd::has_current(worker_));
  autograd::Context context(session_);
  EXPECT_TRUE(autograd::has_current(worker_));
}

}  // namespace
}  // namespace torchspan::shared_library_test
