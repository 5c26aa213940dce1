#include "wire/api/tensors.h"

#include <cstring>
#include <functional>
#include <gtest/gtest.h>
#include <set>

#include <ATen/core/ivalue.h>
#include <torch/torch.h>

#include <torchspan/detail/wire/torch_types.h>

#include "wire/compat.h"
#include "wire/wire_test_util.h"

namespace torchspan::wire::tensors_test {
namespace {

struct DtypeCase {
  const char* name;
  at::ScalarType dtype;
};

constexpr DtypeCase kDtypes[] = {
    {"uint8", at::kByte},
    {"int8", at::kChar},
    {"int16", at::kShort},
    {"int32", at::kInt},
    {"int64", at::kLong},
    {"float16", at::kHalf},
    {"float32", at::kFloat},
    {"float64", at::kDouble},
    {"complex32", at::kComplexHalf},
    {"complex64", at::kComplexFloat},
    {"complex128", at::kComplexDouble},
    {"bool", at::kBool},
    {"bfloat16", at::kBFloat16},
    {"qint8", at::kQInt8},
    {"quint8", at::kQUInt8},
    {"qint32", at::kQInt32},
};

/// Row-major values that differ from each other.
at::Tensor sample(at::ScalarType dtype, at::IntArrayRef sizes) {
  const at::Tensor numbers = at::randint(-60, 60, sizes, at::kFloat);
  if (c10::isQIntType(dtype))
    return at::quantize_per_tensor(numbers, 0.5, dtype == at::kQUInt8 ? 128 : 0, dtype);
  if (dtype == at::kComplexHalf) return at::view_as_complex(at::stack({numbers, -numbers}, -1).to(at::kHalf));
  if (c10::isComplexType(dtype)) return at::complex(numbers, -2 * numbers).to(dtype);
  if (dtype == at::kBool) return numbers > 0;
  return numbers.to(dtype);
}

struct LayoutCase {
  const char* name;
  std::function<at::Tensor(at::ScalarType)> make;
};

const LayoutCase kLayouts[] = {
    {"contiguous",
     [](auto t) {
       return sample(t, {3, 4, 5});
     }},
    {"transposed",
     [](auto t) {
       return sample(t, {3, 4, 5}).transpose(0, 2);
     }},
    {"permuted",
     [](auto t) {
       return sample(t, {2, 3, 4, 5}).permute({2, 0, 3, 1});
     }},
    {"channels_last",
     [](auto t) {
       return sample(t, {2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
     }},
    {"zero_dimensions", [](auto t) { return sample(t, {}); }},
    {"one_element",
     [](auto t) {
       return sample(t, {1, 1});
     }},
    {"empty",
     [](auto t) {
       return sample(t, {3, 0, 2});
     }},
    {"empty_vector", [](auto t) { return sample(t, {0}); }},
    {"empty_strided",
     [](auto t) {
       return sample(t, {3, 0, 2}).transpose(0, 2);
     }},
    {"rows",
     [](auto t) {
       return sample(t, {6, 5}).narrow(0, 2, 3);
     }},
    {"columns",
     [](auto t) {
       return sample(t, {6, 5}).narrow(1, 1, 3);
     }},
    {"columns_transposed",
     [](auto t) {
       return sample(t, {6, 5}).narrow(1, 1, 3).t();
     }},
    {"one_column",
     [](auto t) {
       return sample(t, {6, 5}).select(1, 3);
     }},
    {"every_other", [](auto t) { return sample(t, {9}).slice(0, 1, 9, 2); }},
    {"odd_strides_of_one",
     [](auto t) {
       return sample(t, {4, 6}).narrow(0, 2, 1).narrow(1, 0, 6).t();
     }},
    {"channels_last_part",
     [](auto t) {
       return sample(t, {2, 6, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast).narrow(1, 1, 3);
     }},
    {"expanded_front",
     [](auto t) {
       return sample(t, {1, 4}).expand({3, 4});
     }},
    {"expanded_back",
     [](auto t) {
       return sample(t, {4, 1}).expand({4, 7});
     }},
    {"expanded_scalar",
     [](auto t) {
       return sample(t, {}).expand({5, 5});
     }},
    {"expanded_gapped",
     [](auto t) {
       return sample(t, {6, 1, 5}).slice(0, 0, 6, 2).expand({3, 8, 5});
     }},
    {"expanded_transposed",
     [](auto t) {
       return sample(t, {1, 3, 4}).expand({2, 3, 4}).transpose(1, 2);
     }},
    {"overlapping",
     [](auto t) {
       return sample(t, {8}).as_strided({6, 3}, {1, 1});
     }},
};

/// Counts elements at different addresses without the code under test.
std::int64_t distinct_places(const at::Tensor& tensor) {
  std::set<std::int64_t> places{0};
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    std::set<std::int64_t> next;
    for (std::int64_t i = 0; i < tensor.size(d); ++i) {
      for (std::int64_t place : places) next.insert(place + i * tensor.stride(d));
    }
    places = std::move(next);
  }
  return tensor.numel() == 0 ? 0 : static_cast<std::int64_t>(places.size());
}

/// Elements in logical order, as bytes: an oracle that knows every dtype and every bit.
std::vector<std::string> elements_of(const at::Tensor& tensor) {
  std::vector<std::string> elements;
  std::vector<std::int64_t> index(static_cast<std::size_t>(tensor.dim()), 0);
  const auto* data = static_cast<const char*>(tensor.data_ptr());
  for (std::int64_t n = 0; n < tensor.numel(); ++n) {
    std::int64_t rest = n, place = 0;
    for (std::int64_t d = tensor.dim(); d-- > 0;) {
      place += rest % tensor.size(d) * tensor.stride(d);
      rest /= tensor.size(d);
    }
    const auto size = static_cast<std::int64_t>(tensor.element_size());
    elements.emplace_back(data + place * size, static_cast<std::size_t>(size));
  }
  return elements;
}

void expect_same_tensor(const at::Tensor& got, const at::Tensor& sent) {
  EXPECT_EQ(got.scalar_type(), sent.scalar_type());
  EXPECT_EQ(got.sizes(), sent.sizes());
  EXPECT_EQ(got.layout(), sent.layout());
  EXPECT_EQ(got.requires_grad(), sent.requires_grad());
  EXPECT_TRUE(got.is_leaf());
  EXPECT_FALSE(got.is_conj() || got.is_neg());
  EXPECT_EQ(got.is_quantized(), sent.is_quantized());
  if (sent.is_quantized() && sent.qscheme() == at::kPerTensorAffine) {
    EXPECT_EQ(got.q_scale(), sent.q_scale());
    EXPECT_EQ(got.q_zero_point(), sent.q_zero_point());
  }
  EXPECT_EQ(elements_of(got), elements_of(sent));
}

TEST(NewerDtypes, ArriveWithTheirBytesWhereThisLibTorchHasThem) {
  for (const int code : {23, 24, 25, 26, 27, 28, 29, 44, 45}) {
    SCOPED_TRACE("dtype " + std::to_string(code));
    at::ScalarType dtype = at::ScalarType::Undefined;
    try {
      dtype = dtype_from_code(static_cast<std::uint8_t>(code));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      continue;
    }
    EXPECT_EQ(dtype_code(dtype), code);
    const at::Tensor bytes = at::arange(128, at::kByte).view({4, 32});
    for (const at::Tensor& sent : {bytes.view(dtype), bytes.view(dtype).slice(0, 1, 4, 2)}) {
      const at::Tensor got = round_trip(sent);
      EXPECT_EQ(got.scalar_type(), dtype);
      EXPECT_EQ(got.sizes(), sent.sizes());
      EXPECT_EQ(elements_of(got), elements_of(sent));
    }
  }
}

class Tensors : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  at::Tensor make() const {
    return kLayouts[std::get<1>(GetParam())].make(kDtypes[std::get<0>(GetParam())].dtype);
  }
};

TEST_P(Tensors, ArriveWithTheirElementsAndTheirOrderInMemory) {
  const at::Tensor sent = make();
  const at::Tensor got = round_trip(sent);
  expect_same_tensor(got, sent);
  EXPECT_EQ(got.storage().nbytes(), got.numel() == 0 ? 0 : distinct_places(got) * got.element_size());
  const bool dense = sent.is_non_overlapping_and_dense();
  // Compares with LibTorch's way to remove gaps from strides; on bytes, because quantized tensors have
  // another.
  const at::Tensor like = at::empty_strided(sent.sizes(), sent.strides(), at::kByte);
  const at::Tensor oracle = at::empty_like(like, {}, at::MemoryFormat::Preserve);
  for (std::int64_t d = 0; d < sent.dim(); ++d) {
    SCOPED_TRACE("dimension " + std::to_string(d));
    if (dense) {
      EXPECT_EQ(got.stride(d), sent.stride(d));
    } else if (sent.size(d) > 1) {
      EXPECT_EQ(got.stride(d) == 0, sent.stride(d) == 0);
      if (distinct_places(sent) == sent.numel()) {
        EXPECT_EQ(got.stride(d), oracle.stride(d));
      }
    }
  }
}

TEST_P(Tensors, TravelWithExactlyTheBytesThatAreViewed) {
  const at::Tensor sent = make();
  const PackedTensors packed = pack(std::span(&sent, 1));
  std::size_t bytes = 0;
  for (const Segment& segment : packed.segments) bytes += segment.size;
  // Elements that overlap partially cannot be sent without a copy.
  const bool overlaps = std::string(kLayouts[std::get<1>(GetParam())].name) == "overlapping";
  const std::int64_t elements = overlaps ? sent.numel() : distinct_places(sent);
  EXPECT_EQ(bytes, static_cast<std::size_t>(elements) * sent.element_size());
}

TEST_P(Tensors, BelongToTheReceiver) {
  const at::Tensor sent = make();
  const std::vector<std::string> before = elements_of(sent);
  const at::Tensor got = round_trip(sent);
  if (got.numel() > 0) std::memset(got.data_ptr(), 0x55, got.storage().nbytes());
  EXPECT_EQ(elements_of(sent), before);
}

INSTANTIATE_TEST_SUITE_P(All, Tensors,
                         ::testing::Combine(::testing::Range(0, static_cast<int>(std::size(kDtypes))),
                                            ::testing::Range(0, static_cast<int>(std::size(kLayouts)))),
                         [](const auto& info) {
                           return std::string(kDtypes[std::get<0>(info.param)].name) + "_" +
                                  kLayouts[std::get<1>(info.param)].name;
                         });

TEST(TensorTable, KeepsTheOrderAndUndefinedTensors) {
  const std::vector<at::Tensor> sent{torch::arange(3), at::Tensor(), torch::zeros({0}), torch::ones({2, 2})};
  const std::vector<at::Tensor> got = round_trip(sent);
  ASSERT_EQ(got.size(), 4u);
  EXPECT_TRUE(at::equal(got[0], sent[0]));
  EXPECT_FALSE(got[1].defined());
  EXPECT_EQ(got[2].sizes(), at::IntArrayRef({0}));
  EXPECT_TRUE(at::equal(got[3], sent[3]));
}

TEST(TensorTable, WithoutTensorsTakesNoBytes) {
  const PackedTensors packed = pack({});
  EXPECT_TRUE(packed.metadata.empty());
  EXPECT_TRUE(unpack(packed.metadata, {}).empty());
}

TEST(TensorTable, RequiresGradTravelsAndMakesALeaf) {
  const at::Tensor leaf = torch::ones({2}, torch::requires_grad());
  for (const at::Tensor& sent :
       {leaf, leaf * 2, torch::ones({2}, torch::requires_grad().dtype(at::kComplexFloat))}) {
    const at::Tensor got = round_trip(sent);
    EXPECT_TRUE(got.requires_grad());
    EXPECT_TRUE(got.is_leaf());
    EXPECT_FALSE(got.grad_fn());
  }
  EXPECT_FALSE(round_trip(leaf.detach()).requires_grad());
  EXPECT_FALSE(round_trip(torch::arange(3)).requires_grad());
}

TEST(TensorTable, AReceivedLeafCanBeTrained) {
  const at::Tensor got = round_trip(torch::full({3}, 2.0, torch::requires_grad()));
  (got * got).sum().backward();
  EXPECT_TRUE(at::equal(got.grad(), torch::full({3}, 4.0)));
}

TEST(TensorTable, ReceivedMemoryIsAdoptedAndReleasedWithTheTensor) {
  const at::Tensor sent = torch::arange(10);
  const PackedTensors packed = pack(std::span(&sent, 1));
  std::vector<Buffer> buffers = deliver(packed.segments);
  const std::byte* memory = buffers[0].data;
  const std::weak_ptr<void> owner = buffers[0].owner;
  at::Tensor got = unpack(packed.metadata, buffers)[0];
  EXPECT_EQ(got.data_ptr(), memory);
  EXPECT_FALSE(owner.expired());
  got = at::Tensor();
  EXPECT_TRUE(owner.expired());
}

TEST(TensorTable, AReceivedTensorCanGrow) {
  at::Tensor got = round_trip(torch::arange(4));
  got.resize_({1000});
  EXPECT_TRUE(at::equal(got.narrow(0, 0, 4), torch::arange(4)));
  got.fill_(7);
  EXPECT_EQ(got.sum().item<std::int64_t>(), 7000);
}

TEST(TensorTable, BorrowsDenseMemoryAndKeepsItsOwnCopies) {
  const at::Tensor base = torch::randn({4, 6});
  const at::Tensor complex = torch::randn({3}, at::kComplexFloat);
  const std::vector<at::Tensor> tensors{base, base.t(), base.narrow(1, 0, 2), complex.conj()};
  const PackedTensors packed = pack(tensors);
  ASSERT_EQ(packed.segments.size(), 4u);
  EXPECT_EQ(packed.segments[0].data, base.data_ptr());
  EXPECT_EQ(packed.segments[0].keep, nullptr);
  EXPECT_EQ(packed.segments[1].keep, nullptr);
  EXPECT_NE(packed.segments[2].keep, nullptr);
  EXPECT_NE(packed.segments[3].keep, nullptr);
}

TEST(TensorTable, LazyConjugationNegationAndZerosAreCarriedOut) {
  const at::Tensor complex = torch::randn({4, 3}, at::kComplexDouble);
  const at::Tensor conjugated = complex.conj();
  ASSERT_TRUE(conjugated.is_conj());
  EXPECT_TRUE(at::equal(round_trip(conjugated), at::conj_physical(complex)));
  EXPECT_TRUE(at::equal(round_trip(conjugated.t()), at::conj_physical(complex).t()));
  const at::Tensor negated = at::imag(conjugated);
  ASSERT_TRUE(negated.is_neg());
  EXPECT_TRUE(at::equal(round_trip(negated), -at::imag(complex)));
  const at::Tensor zeros = at::_efficientzerotensor({2, 3});
  EXPECT_TRUE(at::equal(round_trip(zeros), torch::zeros({2, 3})));
  EXPECT_TRUE(round_trip(complex.requires_grad_().conj()).requires_grad());
}

TEST(TensorTable, LazyConjugationOfComplexHalvesIsCarriedOut) {
  const at::Tensor parts = torch::randn({5, 2}).to(at::kHalf);
  const at::Tensor got = round_trip(at::view_as_complex(parts).conj());
  EXPECT_EQ(got.scalar_type(), at::kComplexHalf);
  EXPECT_TRUE(at::equal(at::view_as_real(got).select(-1, 0), parts.select(-1, 0)));
  EXPECT_TRUE(at::equal(at::view_as_real(got).select(-1, 1), -parts.select(-1, 1)));
}

TEST(TensorTable, NotANumbersKeepTheirBits) {
  const at::Tensor sent = torch::full({2, 3}, 0x7FC01234, at::kInt).view(at::kFloat).narrow(1, 0, 2);
  EXPECT_EQ(elements_of(round_trip(sent)), elements_of(sent));
}

TEST(QuantizedTensors, KeepTheirChannelsScales) {
  const at::Tensor numbers = torch::randn({3, 4, 2});
  const at::Tensor scales = torch::tensor({0.1, 0.2, 0.3, 0.4}, at::kDouble);
  const at::Tensor zero_points = torch::tensor({1, 2, 3, 4}, at::kLong);
  for (const at::ScalarType dtype : {at::kQInt8, at::kQUInt8, at::kQInt32}) {
    const at::Tensor sent = at::quantize_per_channel(numbers, scales, zero_points, 1, dtype);
    const at::Tensor got = round_trip(sent);
    expect_same_tensor(got, sent);
    EXPECT_EQ(got.qscheme(), at::kPerChannelAffine);
    EXPECT_EQ(got.q_per_channel_axis(), 1);
    EXPECT_TRUE(at::equal(got.q_per_channel_scales(), scales));
    EXPECT_TRUE(at::equal(got.q_per_channel_zero_points(), zero_points));
    EXPECT_TRUE(at::equal(got.dequantize(), sent.dequantize()));
  }
}

TEST(QuantizedTensors, OfSeveralElementsPerByteKeepTheirBytes) {
  const at::Tensor scales = torch::full({3}, 0.2, at::kFloat),
                   zero_points = torch::full({3}, -1.0, at::kFloat);
  for (const auto& [dtype, bytes] : {std::pair(at::kQUInt4x2, 9u), std::pair(at::kQUInt2x4, 6u)}) {
    const at::Tensor sent = at::quantize_per_channel(torch::rand({3, 5}), scales, zero_points, 0, dtype);
    const at::Tensor got = round_trip(sent);
    EXPECT_EQ(got.scalar_type(), dtype);
    EXPECT_EQ(got.sizes(), sent.sizes());
    EXPECT_EQ(got.qscheme(), at::kPerChannelAffineFloatQParams);
    EXPECT_TRUE(at::equal(got.q_per_channel_scales(), scales));
    EXPECT_TRUE(at::equal(got.q_per_channel_zero_points(), zero_points));
    ASSERT_EQ(got.storage().nbytes(), bytes);
    EXPECT_EQ(std::memcmp(got.data_ptr(), sent.data_ptr(), bytes), 0);
  }
}

void expect_same_sparse(const at::Tensor& got, const at::Tensor& sent) {
  EXPECT_EQ(got.layout(), at::kSparse);
  EXPECT_EQ(got.sizes(), sent.sizes());
  EXPECT_EQ(got.sparse_dim(), sent.sparse_dim());
  EXPECT_EQ(got.dense_dim(), sent.dense_dim());
  EXPECT_EQ(got.is_coalesced(), sent.is_coalesced());
  EXPECT_EQ(got.requires_grad(), sent.requires_grad());
  EXPECT_TRUE(at::equal(got._indices(), sent._indices()));
  EXPECT_EQ(got._values().scalar_type(), sent._values().scalar_type());
  EXPECT_EQ(got._values().strides(), sent._values().contiguous().strides());
  EXPECT_TRUE(at::equal(got._values(), sent._values()));
}

TEST(SparseTensors, KeepIndicesValuesAndWhetherTheyAreCoalesced) {
  const at::Tensor indices = torch::tensor({{2, 0, 2}, {1, 4, 1}}, at::kLong);
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kLong, at::kBool, at::kComplexFloat, at::kHalf}) {
    const at::Tensor flat = at::sparse_coo_tensor(indices, torch::tensor({3, 4, 5}).to(dtype), {3, 5});
    const at::Tensor hybrid =
        at::sparse_coo_tensor(indices, torch::arange(18).view({3, 2, 3}).to(dtype), {3, 5, 2, 3});
    expect_same_sparse(round_trip(flat), flat);
    expect_same_sparse(round_trip(hybrid), hybrid);
    if (dtype == at::kHalf || dtype == at::kBool) continue;  // LibTorch does not coalesce these
    expect_same_sparse(round_trip(flat.coalesce()), flat.coalesce());
  }
}

TEST(SparseTensors, MayBeEmptyOrWithoutSparseDimensions) {
  const at::Tensor empty = at::sparse_coo_tensor({4, 5}, torch::TensorOptions().dtype(at::kFloat));
  expect_same_sparse(round_trip(empty), empty);
  const at::Tensor dense_only =
      at::sparse_coo_tensor(torch::zeros({0, 1}, at::kLong), torch::randn({1, 3}), {3});
  expect_same_sparse(round_trip(dense_only), dense_only);
}

TEST(SparseTensors, WithOneIndexForAllValuesAreSentWithAllIndices) {
  const at::Tensor indices = torch::ones({1, 1}, at::kLong).expand({1, 6});
  const at::Tensor sent = at::_sparse_coo_tensor_unsafe(indices, torch::randn({6}), {3});
  ASSERT_EQ(sent._indices().stride(1), 0);
  expect_same_sparse(round_trip(sent), sent);
}

TEST(SparseTensors, RequireGradAndBorrowTheirParts) {
  const at::Tensor sent =
      at::sparse_coo_tensor(torch::tensor({{0, 1}}, at::kLong), torch::ones({2}), {2}).requires_grad_();
  expect_same_sparse(round_trip(sent), sent);
  const PackedTensors packed = pack(std::span(&sent, 1));
  ASSERT_EQ(packed.segments.size(), 2u);
  EXPECT_EQ(packed.segments[1].data, sent._values().data_ptr());
  EXPECT_EQ(packed.segments[1].keep, nullptr);
}

TEST(SparseTensors, GradientOfAnEmbeddingArrivesAsItIs) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 3).sparse(true));
  embedding(torch::tensor({1, 7, 1})).sum().backward();
  const at::Tensor sent = embedding->weight.grad();
  const at::Tensor got = round_trip(sent);
  EXPECT_EQ(got._nnz(), sent._nnz());
  EXPECT_TRUE(at::equal(got.to_dense(), sent.to_dense()));
}

void expect_unsupported(const at::Tensor& tensor, const std::string& reason) {
  const std::vector<at::Tensor> tensors{torch::ones({1}), tensor};
  try {
    pack(tensors);
    ADD_FAILURE() << "packed although " << reason;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_NE(error.message().find(reason), std::string::npos) << error.message();
    EXPECT_NE(error.message().find("tensor 1 of 2"), std::string::npos) << error.message();
  }
}

TEST(UnsupportedTensors, AreRefusedByPositionAndReason) {
  expect_unsupported(torch::eye(3).to_sparse_csr(), "SparseCsr");
  expect_unsupported(torch::ones({2, 2}, at::kMeta), "meta");
#if !TORCHSPAN_LIBTORCH_AT_LEAST(2, 13)
  expect_unsupported(torch::ones({2, 2}).rename(std::vector{at::Dimname::fromSymbol(at::Symbol::dimname("N")),
                                                            at::Dimname::wildcard()}),
                     "rename");
#endif
  expect_unsupported(torch::zeros(std::vector<std::int64_t>(65, 1)), "dimensions");
  expect_unsupported(torch::zeros({1}).expand({std::int64_t{1} << 62}), "2^63");
  if (at::hasMKLDNN()) expect_unsupported(torch::ones({2, 2}).to_mkldnn(), "Mkldnn");
}

/// A message may be sent later than its tensors live.
TEST(OwnMemory, KeepsWhatTensorsHadWhenTheyWerePacked) {
  at::Tensor changed = at::ones({3, 5}, at::kLong);
  at::Tensor gaps = at::ones({4, 4}, at::kInt).t().slice(0, 0, 2);  // packed as a copy
  PackedTensors packed = pack(std::vector<at::Tensor>{changed, at::Tensor(), gaps, at::zeros({0})});
  const std::byte* copied = packed.segments.at(1).data;
  packed.own_memory();
  EXPECT_EQ(packed.segments.at(1).data, copied);
  changed.zero_();
  std::vector<Buffer> received;
  for (const Segment& segment : packed.segments) {
    EXPECT_TRUE(segment.keep);
    received.push_back(allocate_buffer(segment.size));
    std::memcpy(received.back().data, segment.data, segment.size);
  }
  const std::vector<at::Tensor> tensors = unpack(packed.metadata, received);
  EXPECT_TRUE(tensors.at(0).equal(at::ones({3, 5}, at::kLong)));
  EXPECT_TRUE(tensors.at(2).equal(gaps));
}

}  // namespace
}  // namespace torchspan::wire::tensors_test
