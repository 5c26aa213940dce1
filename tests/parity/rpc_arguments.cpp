// Values that can be sent: tensors alone and inside containers and structs, and how operators match their
// arguments.
#include <ATen/ATen.h>

#include "tests/parity/rpc_world.h"
#include "wire/api/tensors.h"

namespace torchspan::rpc_arguments {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

struct Parcel {
  at::Tensor tensor;
  std::string label;
  std::vector<std::map<std::string, at::Tensor>> inner;
};

}  // namespace

}  // namespace torchspan::rpc_arguments

namespace torchspan {

template <>
struct Wire<rpc_arguments::Parcel>
    : WireStruct<rpc_arguments::Parcel, "Parcel", &rpc_arguments::Parcel::tensor,
                 &rpc_arguments::Parcel::label, &rpc_arguments::Parcel::inner> {};

}  // namespace torchspan

namespace torchspan::rpc_arguments {
namespace {

at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b) { return a + b; }
at::Tensor same_tensor(const at::Tensor& x) { return x; }
std::vector<at::Tensor> same_tensors(const std::vector<at::Tensor>& x) { return x; }
std::tuple<std::vector<std::vector<at::Tensor>>, std::map<std::string, at::Tensor>> swapped(
    const std::map<std::string, at::Tensor>& named, const std::vector<std::vector<at::Tensor>>& nested) {
  return {nested, named};
}
Parcel forward(const Parcel& parcel) { return {parcel.tensor * 2, parcel.label + "!", parcel.inner}; }
/// Sizes, strides, bytes of storage.
std::vector<std::int64_t> layout(const at::Tensor& x) {
  std::vector<std::int64_t> text(x.sizes().begin(), x.sizes().end());
  text.insert(text.end(), x.strides().begin(), x.strides().end());
  text.push_back(static_cast<std::int64_t>(x.storage().nbytes()));
  return text;
}

constexpr Function<sum_of> kSumOf{"sum_of"};
constexpr Function<same_tensor> kSameTensor{"same_tensor"};
constexpr Function<same_tensors> kSameTensors{"same_tensors"};
constexpr Function<swapped> kSwapped{"swapped"};
constexpr Function<forward> kForward{"forward"};
constexpr Function<layout> kLayout{"layout"};

ClusterOptions world(int workers = 2) {
  return world_of(workers,
                  FunctionTable().add(kSumOf, kSameTensor, kSameTensors, kSwapped, kForward, kLayout));
}

// peer: rpc_test.py py_tensors: same
TEST(RpcConformance, PyTensors) {
  on_all(world(4), [](Worker& worker) {
    const std::int64_t n = worker.rank() + 1;
    const at::Tensor sum = worker.rpc_sync(n % 4, kSumOf, at::ones({n, n}), at::ones({n, n}));
    EXPECT_TRUE(at::equal(sum, at::full({n, n}, 2.0)));
  });
}

// peer: rpc_test.py py_tensors_multi_async_call: same
TEST(RpcConformance, PyTensorsMultiAsyncCall) {
  on_all(world(2), [](Worker& worker) {
    std::vector<Future<at::Tensor>> sums;
    for (std::int64_t i = 0; i < 100; ++i) {
      sums.push_back(worker.rpc_async(1 - worker.rank(), kSumOf, at::ones({i, i}), at::full({i, i}, i)));
    }
    for (std::int64_t i = 0; i < 100; ++i) {
      EXPECT_TRUE(at::equal(sums[i].wait(), at::full({i, i}, 1.0 + i))) << i;
    }
  });
}

// peer: rpc_test.py py_tensors_in_container: same
TEST(RpcConformance, PyTensorsInContainer) {
  on_first(world(), [](Worker& worker) {
    const std::map<std::string, at::Tensor> named{{"a", at::arange(3)}, {"b", at::ones({2, 2}, at::kDouble)}};
    const std::vector<std::vector<at::Tensor>> nested{{}, {at::arange(4)}, {at::arange(5), at::Tensor()}};
    const auto [list, map] = worker.rpc_sync("worker1", kSwapped, named, nested);
    ASSERT_EQ(map.size(), 2u);
    for (const auto& [key, tensor] : named) EXPECT_TRUE(at::equal(map.at(key), tensor)) << key;
    ASSERT_EQ(list.size(), 3u);
    EXPECT_TRUE(list[0].empty());
    EXPECT_TRUE(at::equal(list[1].at(0), at::arange(4)));
    EXPECT_TRUE(at::equal(list[2].at(0), at::arange(5)));
    EXPECT_FALSE(list[2].at(1).defined());
  });
}

// peer: rpc_test.py py_nested_pickle: same
TEST(RpcConformance, PyNestedPickle) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor x = at::arange(6).reshape({2, 3});
    const Parcel back = worker.rpc_sync("worker1", kForward, Parcel{x, "fragile", {{}, {{"deep", x + 1}}}});
    EXPECT_EQ(back.label, "fragile!");
    EXPECT_TRUE(at::equal(back.tensor, x * 2));
    ASSERT_EQ(back.inner.size(), 2u);
    EXPECT_TRUE(back.inner[0].empty());
    EXPECT_TRUE(at::equal(back.inner[1].at("deep"), x + 1));
  });
}

// peer: rpc_test.py non_cont_tensors: same
TEST(RpcConformance, NonContTensors) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor slice = at::arange(100).reshape({10, 10}).slice(1, 2, 5);
    ASSERT_FALSE(slice.is_contiguous());
    for (const at::Tensor& x : {at::arange(12).reshape({3, 4}).t(), at::arange(3).expand({4, 3})}) {
      const at::Tensor back = worker.rpc_sync("worker1", kSameTensor, x);
      EXPECT_TRUE(at::equal(back, x));
      EXPECT_EQ(back.strides(), x.strides());
      EXPECT_EQ(back.is_contiguous(), x.is_contiguous());
    }
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", kSameTensor, slice), slice));
  });
}

// peer: test_cpp_rpc WireSerialize.Base: same
TEST(RpcConformance, WireSerializeBase) {
  on_first(world(), [](Worker& worker) {
    const std::vector<at::Tensor> tensors{at::Tensor(),
                                          at::empty({0}),
                                          at::full({}, 3.5),
                                          at::arange(5),
                                          at::ones({2, 3}, at::kBool),
                                          at::randn({3}).set_requires_grad(true)};
    const auto back = worker.rpc_sync("worker1", kSameTensors, tensors);
    ASSERT_EQ(back.size(), tensors.size());
    EXPECT_FALSE(back[0].defined());
    for (std::size_t i = 1; i < tensors.size(); ++i) {
      EXPECT_TRUE(at::equal(back[i], tensors[i])) << i;
      EXPECT_EQ(back[i].dtype(), tensors[i].dtype()) << i;
      EXPECT_EQ(back[i].requires_grad(), tensors[i].requires_grad()) << i;
    }
  });
}

// "Sparse" there: a small view of a large storage is sent without the rest.
// peer: test_cpp_rpc WireSerialize.RecopySparseTensors: same
TEST(RpcConformance, WireSerializeRecopySparseTensors) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor large = at::randn({100000});
    const at::Tensor small = large.slice(0, 1000, 1010);
    EXPECT_EQ(worker.rpc_sync("worker1", kLayout, small), (std::vector<std::int64_t>{10, 1, 40}));
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", kSameTensor, small), small));
    const at::Tensor column = large.reshape({1000, 100}).select(1, 3);
    EXPECT_LT(worker.rpc_sync("worker1", kLayout, column).back(), 10000);
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", kSameTensor, column), column));
  });
}

// peer: test_cpp_rpc WireSerialize.CloneSparseTensors: same
TEST(RpcConformance, WireSerializeCloneSparseTensors) {
  const at::Tensor large = at::arange(100000);
  const std::vector<at::Tensor> tensors{large.slice(0, 5, 7), large};
  wire::PackedTensors packed = wire::pack(tensors);
  ASSERT_EQ(packed.segments.size(), 2u);
  EXPECT_EQ(packed.segments[0].size, 2 * sizeof(std::int64_t));
  EXPECT_EQ(packed.segments[1].size, 100000 * sizeof(std::int64_t));
  EXPECT_EQ(packed.segments[1].data, large.data_ptr()) << "the whole tensor is sent as it lies";
  std::vector<Buffer> received;
  for (const Segment& segment : packed.segments) {
    received.push_back(allocate_buffer(segment.size));
    std::memcpy(received.back().data, segment.data, segment.size);
  }
  const auto back = wire::unpack(packed.metadata, received);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(back.at(i), tensors[i])) << i;
}

// peer: test_cpp_rpc WireSerialize.Errors: better: every truncated encoding is rejected
TEST(RpcConformance, WireSerializeErrors) {
  const std::vector<at::Tensor> tensors{at::arange(4), at::ones({3})};
  const wire::PackedTensors packed = wire::pack(tensors);
  auto buffers = [&] {
    std::vector<Buffer> list;
    for (const Segment& segment : packed.segments) {
      list.push_back(allocate_buffer(segment.size));
      std::memcpy(list.back().data, segment.data, segment.size);
    }
    return list;
  };
  auto whole = buffers();
  ASSERT_EQ(wire::unpack(packed.metadata, whole).size(), 2u);
  for (std::size_t kept = 1; kept < packed.metadata.size(); ++kept) {
    auto list = buffers();
    EXPECT_EQ(error_of([&] { wire::unpack(BytesView(packed.metadata).first(kept), list); }).kind(),
              ErrorKind::kInvalid)
        << kept;
  }
  auto one = buffers();
  one.pop_back();
  EXPECT_EQ(error_of([&] { wire::unpack(packed.metadata, one); }).kind(), ErrorKind::kInvalid);
  Bytes longer = packed.metadata;
  longer.push_back(std::byte(0));
  auto list = buffers();
  EXPECT_EQ(error_of([&] { wire::unpack(longer, list); }).kind(), ErrorKind::kInvalid);
}

// peer: test_cpp_rpc TensorpipeSerialize.Base: same
TEST(RpcConformance, TensorpipeSerializeBase) {
  on_first(world(), [](Worker& worker) {
    for (const at::ScalarType dtype :
         {at::kFloat, at::kDouble, at::kLong, at::kByte, at::kHalf, at::kBFloat16}) {
      const at::Tensor x = at::arange(100).remainder(7).to(dtype);
      const at::Tensor back = worker.rpc_sync("worker1", kSameTensor, x);
      EXPECT_EQ(back.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(back, x)) << dtype;
    }
  });
}

// peer: test_cpp_rpc TensorpipeSerialize.RecopySparseTensors: same
TEST(RpcConformance, TensorpipeSerializeRecopySparseTensors) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor large = at::arange(100000);
    const auto back =
        worker.rpc_sync("worker1", kSameTensors, std::vector<at::Tensor>{large, large.slice(0, 7, 9)});
    EXPECT_TRUE(at::equal(back.at(0), large));
    EXPECT_TRUE(at::equal(back.at(1), large.slice(0, 7, 9)));
    EXPECT_EQ(back.at(1).storage().nbytes(), 16u);
  });
}

// peer: test_cpp_rpc TensorpipeSerialize.NoDeleterTensors: better: borrowed memory may change as soon as
//   the call returns
TEST(RpcConformance, TensorpipeSerializeNoDeleterTensors) {
  on_first(world(), [](Worker& worker) {
    std::vector<float> memory{2.2F, 3.3F, 4.4F, 5.5F};
    const at::Tensor borrowed = at::from_blob(memory.data(), {4}, at::kFloat);
    auto later = worker.rpc_async("worker1", kSameTensor, borrowed);
    auto to_self = worker.rpc_async(0, kSameTensor, borrowed);
    memory.assign(4, 0.0F);
    const at::Tensor expected = at::tensor({2.2F, 3.3F, 4.4F, 5.5F});
    EXPECT_TRUE(at::equal(later.wait(), expected));
    EXPECT_TRUE(at::equal(to_self.wait(), expected));
  });
}

// peer: rpc_test.py (`*_sparse`, 18 repeats) sparse arguments and results: same: the tensor table carries
//   sparse COO tensors in every call
TEST(RpcConformance, SparseTensors) {
  on_first(world(), [](Worker& worker) {
    const at::Tensor x = at::sparse_coo_tensor(at::tensor({0, 1, 1, 2, 0, 2}, at::kLong).reshape({2, 3}),
                                               at::tensor({3.0, 4.0, 5.0}), {2, 3});
    const at::Tensor sum = worker.rpc_sync("worker1", kSumOf, x, x);
    EXPECT_TRUE(sum.is_sparse());
    EXPECT_TRUE(at::equal(sum.to_dense(), x.to_dense() * 2));
  });
}

const at::Tensor& matrix(at::Tensor& memory) { return memory = at::arange(6, at::kFloat).reshape({2, 3}); }

// peer: jit/rpc_test.py all_kwargs_are_populated_by_defaults: same
TEST(RpcConformance, AllKwargsArePopulatedByDefaults) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    EXPECT_TRUE(
        at::equal(worker.rpc_sync("worker1", "aten::softmax.int", {x, 1}).toTensor(), at::softmax(x, 1)));
    EXPECT_TRUE(
        at::equal(worker.rpc_sync("worker1", "aten::flatten.using_ints", {x}).toTensor(), x.flatten()));
  });
}

// peer: jit/rpc_test.py some_kwargs_are_populated_by_defaults: same
TEST(RpcConformance, SomeKwargsArePopulatedByDefaults) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    const auto sums = worker.rpc_sync("worker1", "aten::sum.dim_IntList", {x, std::vector<std::int64_t>{1}},
                                      {{"keepdim", true}});
    EXPECT_TRUE(at::equal(sums.toTensor(), x.sum({1}, true)));
  });
}

// peer: jit/rpc_test.py no_kwargs_are_populated_by_defaults: same
TEST(RpcConformance, NoKwargsArePopulatedByDefaults) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    auto call = [&](const at::IntArrayRef dims) {
      return worker
          .remote("worker1", "aten::sum", {x, dims.vec()},
                  {{"keepdim", true}, {"dtype", static_cast<std::int64_t>(at::kDouble)}})
          .to_here()
          .toTensor();
    };
    EXPECT_TRUE(at::equal(call({0}), x.sum({0}, true, at::kDouble)));
    EXPECT_EQ(call({1}).scalar_type(), at::kDouble);
  });
}

// peer: jit/rpc_test.py args_and_kwargs_contain_different_types: same
TEST(RpcConformance, ArgsAndKwargsContainDifferentTypes) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    const auto sorted =
        worker.rpc_async("worker1", "aten::topk", {x, 2}, {{"dim", 1}, {"largest", false}, {"sorted", true}});
    const auto elements = sorted.wait().toTupleRef().elements();
    ASSERT_EQ(elements.size(), 2u);
    const auto [values, places] = at::topk(x, 2, 1, false, true);
    EXPECT_TRUE(at::equal(elements[0].toTensor(), values));
    EXPECT_TRUE(at::equal(elements[1].toTensor(), places));
  });
}

void expect_no_overload(const std::vector<c10::IValue>& args,
                        const std::map<std::string, c10::IValue>& kwargs, const std::string& given) {
  on_first(world(), [&](Worker& worker) {
    for (const bool remote : {false, true}) {
      const Error error = error_of([&] {
        if (remote) {
          worker.remote("worker1", "aten::add.Tensor", args, kwargs).to_here();
        } else {
          worker.rpc_sync("worker1", "aten::add.Tensor", args, kwargs);
        }
      });
      EXPECT_EQ(error.kind(), ErrorKind::kInvalid) << error.what();
      EXPECT_THAT(error.what(), AllOf(HasSubstr("no overload of 'aten::add.Tensor' takes (" + given + ")"),
                                      HasSubstr("Tensor self, Tensor other"), HasSubstr("worker1")));
    }
    EXPECT_EQ(worker.rpc_sync("worker1", "aten::add", {2, 3}).toInt(), 5) << "the callee serves on";
  });
}

// peer: jit/rpc_test.py less_than_needed_args_are_specified: same
TEST(RpcConformance, LessThanNeededArgsAreSpecified) { expect_no_overload({at::ones({2})}, {}, "Tensor"); }

// peer: jit/rpc_test.py more_than_needed_args_are_specified: same
TEST(RpcConformance, MoreThanNeededArgsAreSpecified) {
  expect_no_overload({at::ones({2}), at::ones({2}), 1, 2}, {}, "Tensor, Tensor, Int, Int");
}

// peer: jit/rpc_test.py (documented) keywords choose the overload: same
TEST(RpcConformance, KwargsChooseTheOverload) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    const std::map<std::string, c10::IValue> kwargs{{"dim", std::vector<std::int64_t>{1}}, {"keepdim", true}};
    EXPECT_TRUE(at::equal(worker.rpc_sync("worker1", "aten::sum", {x}, kwargs).toTensor(), x.sum({1}, true)));
  });
}

// peer: jit/rpc_test.py (documented) overloads that lack a keyword are skipped: same
TEST(RpcConformance, KwargsSkipOverloadsWithoutThem) {
  on_first(world(), [](Worker& worker) {
    at::Tensor memory;
    const at::Tensor& x = matrix(memory);
    const std::map<std::string, c10::IValue> kwargs{{"dim", 1}, {"keepdim", true}};
    for (const std::string name : {"aten::max", "aten::min", "aten::argmax", "aten::all", "aten::prod"}) {
      EXPECT_NO_THROW(worker.rpc_sync("worker1", name, {x}, kwargs)) << name;
    }
  });
}

// peer: jit/rpc_test.py unexepected_kwarg_is_specified: same
TEST(RpcConformance, UnexepectedKwargIsSpecified) {
  expect_no_overload({at::ones({2}), at::ones({2})}, {{"third_kwarg", 1}}, "Tensor, Tensor, third_kwarg=Int");
}

}  // namespace
}  // namespace torchspan::rpc_arguments
