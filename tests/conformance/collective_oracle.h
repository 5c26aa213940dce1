#pragma once
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <torchspan/collective.h>
#include <torchspan/detail/core/mutex.h>

#include "tests/support/reduce_step.h"

namespace torchspan::testing {

/// Whether two dense tensors have the same dtype, shape and bits.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

/// A random tensor; a large one repeats its first numbers. The period is prime, so that data in a wrong place differs
/// nevertheless, and short, because drawing would otherwise take most of the time of a test.
inline at::Tensor random_tensor(at::IntArrayRef sizes, at::ScalarType dtype, at::Generator& generator) {
  constexpr std::int64_t kPeriod = 10007;
  const std::int64_t length = c10::multiply_integers(sizes);
  const std::int64_t drawn = std::min(length, kPeriod);
  at::Tensor numbers;
  if (at::isIntegralType(dtype, /*includeBool=*/true)) {
    const std::int64_t high = dtype == at::kBool ? 2 : 100;
    numbers = at::randint(high, {drawn}, generator, at::kLong).to(dtype);
  } else if (at::isComplexType(dtype)) {
    const auto real = at::randn({drawn}, generator, at::kDouble),
               imaginary = at::randn({drawn}, generator, at::kDouble);
    numbers = at::complex(real, imaginary).to(dtype);
  } else {
    numbers = at::randn({drawn}, generator, at::kDouble).to(dtype);
  }
  if (drawn < length) numbers = numbers.repeat({(length + kPeriod - 1) / kPeriod}).narrow(0, 0, length);
  return numbers.reshape(sizes);
}

/// The tensors of all ranks, which every rank can compute.
inline std::vector<at::Tensor> random_inputs(int ranks, at::IntArrayRef sizes, at::ScalarType dtype,
                                             std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < ranks; ++rank) inputs.push_back(random_tensor(sizes, dtype, generator));
  return inputs;
}

/// A product of complex numbers by its four real products: LibTorch's own rounds differently at the end of a
/// row.
inline at::Tensor complex_product(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = at::real(a), y = at::imag(a), u = at::real(b), v = at::imag(b);
  return at::complex(x * u - y * v, x * v + y * u);
}

/// The same reduction by LibTorch alone, in rank order; halves are summed in float and rounded once.
inline at::Tensor reduce_alone(const std::vector<at::Tensor>& inputs, collective::ReduceOp reduction) {
  if (inputs.size() == 1) return inputs[0];
  const at::ScalarType dtype = inputs[0].scalar_type();
  const bool widen = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = [&](const at::Tensor& tensor) { return widen ? tensor.to(at::kFloat) : tensor; };
  at::Tensor result = wide(inputs[0]).clone();
  for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
    const at::Tensor next = wide(inputs[rank]);
    const bool complex = reduction == collective::kProduct && at::isComplexType(dtype);
    result = complex ? complex_product(result, next) : reduce_step(result, next, reduction);
  }
  const auto ranks = static_cast<std::int64_t>(inputs.size());
  if (reduction == collective::kAvg && at::isComplexType(dtype)) {
    result = at::view_as_complex(at::view_as_real(result) / ranks);  // real and imaginary part separately
  } else if (reduction == collective::kAvg) {
    result = result / ranks;
  }
  return result.to(dtype);
}

/// The tensors of all ranks. Ranks that are threads of one process share them; do not write to them. Thread-safe.
class SharedInputs {
 public:
  explicit SharedInputs(std::vector<at::Tensor> tensors)
      : tensors_(std::make_shared<const std::vector<at::Tensor>>(std::move(tensors))) {}

  const std::vector<at::Tensor>& all() const { return *tensors_; }
  std::size_t size() const { return tensors_->size(); }
  const at::Tensor& operator[](std::size_t rank) const { return tensors_->at(rank); }
  /// reduce_alone(), which the first rank that asks computes.
  at::Tensor reduced(collective::ReduceOp reduction) const {
    MutexLock lock(results_->mutex);
    at::Tensor& result = results_->by_reduction[reduction];
    if (!result.defined()) result = reduce_alone(*tensors_, reduction);
    return result;
  }

 private:
  struct Results {
    Mutex mutex;  // held while a result is computed
    std::map<collective::ReduceOp, at::Tensor> by_reduction TORCHSPAN_GUARDED_BY(mutex);
  };
  std::shared_ptr<const std::vector<at::Tensor>> tensors_;
  std::shared_ptr<Results> results_ = std::make_shared<Results>();
};

/// random_inputs(), which the first rank that asks draws: otherwise, each of P ranks would draw the tensors of P ranks.
/// Thread-safe.
class InputsOfRanks {
 public:
  SharedInputs get(int ranks, at::IntArrayRef sizes, at::ScalarType dtype, std::uint64_t seed) {
    const Key key{ranks, sizes.vec(), dtype, seed};
    MutexLock lock(mutex_);
    for (const auto& [known, inputs] : latest_) {
      if (known == key) return inputs;
    }
    constexpr std::size_t kMost = 8;  // no rank is far ahead of the others
    if (latest_.size() == kMost) latest_.pop_front();
    return latest_.emplace_back(key, SharedInputs(random_inputs(ranks, sizes, dtype, seed))).second;
  }

 private:
  struct Key {
    int ranks;
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    std::uint64_t seed;
    bool operator==(const Key&) const = default;
  };
  Mutex mutex_;  // held while tensors are drawn
  std::deque<std::pair<Key, SharedInputs>> latest_ TORCHSPAN_GUARDED_BY(mutex_);
};

}  // namespace torchspan::testing
