#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <map>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/reducer.h>
#include <torchspan/detail/core/mutex.h>
#include <torchspan/detail/device/streams.h>

#include "core/api/hashes.h"
#include "core/api/throw_invalid.h"
#include "data_parallel/averaging/packed_tensors.h"

namespace torchspan::data_parallel {
namespace {

constexpr const char* kIteration = "iteration";
constexpr const char* kError = "error.";
constexpr const char* kFactor = "factor.";

/// One gradient as a matrix, which this step compresses.
struct Matrix {
  std::string name;
  at::Tensor gradient;  ///< where the average goes
  at::Tensor input;     ///< M: the gradient and the error of the last step
  at::Tensor q;         ///< orthonormal columns
};

/// For tensors that another stream has allocated: this one may still read them when they are released.
void keep_for_this_stream(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (device::has_streams(tensor.device()))
      device::keep_memory_for(tensor, device::current_stream(tensor.device()));
  }
}

/// Random numbers that depend on nothing but these arguments.
at::Tensor random_matrix(std::uint64_t seed, std::int64_t iteration, const std::string& name,
                         std::int64_t rows, std::int64_t columns) {
  const std::uint64_t mixed = fnv1a(name, seed * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(iteration));
  return at::randn({rows, columns}, at::make_generator<at::CPUGeneratorImpl>(mixed));
}

/// Makes the columns orthonormal, in place. Columns of zeros, which a gradient of lower rank leaves, become
/// those of `spare`. Gram-Schmidt, repeated for each column because one round loses digits of similar columns.
void orthonormalize(const at::Tensor& matrix, const at::Tensor& spare) {
  constexpr float kTiny = std::numeric_limits<float>::min();
  for (std::int64_t c = 0; c < matrix.size(1); ++c) {
    const at::Tensor column = matrix.select(1, c);
    column.copy_(at::where(column.norm() > kTiny, column, spare.select(1, c)));
    const at::Tensor before = matrix.narrow(1, 0, c);
    for (int round = 0; round < 2; ++round) {
      if (c > 0) column.sub_(at::mv(before, at::mv(before.t(), column)));
      column.div_(column.norm().clamp_min(kTiny));
    }
  }
}

at::ScalarType dtype_of_factors(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

using StateTensors = std::map<std::string, at::Tensor>;

/// The tensor of a parameter; undefined without one. Throws if it belongs to another model or other options.
at::Tensor find(const StateTensors& tensors, const std::string& name, at::IntArrayRef sizes) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return {};
  if (found->second.sizes() == sizes) return found->second;
  throw_invalid(
      "PowerSgd's state of parameter '{}' has shape [{}] where [{}] is needed: load the state of the same "
      "model and the same PowerSgdOptions::rank",
      name, fmt::join(found->second.sizes().vec(), ", "), fmt::join(sizes.vec(), ", "));
}

}  // namespace

class PowerSgd::State {
 public:
  explicit State(const PowerSgdOptions& options) : options_(options) {}

  Future<at::Tensor> reduce(const GradientBucket& bucket, const collective::Group& group,
                            const std::shared_ptr<State>& self);
  std::int64_t iteration() const;
  Traffic traffic() const;
  std::vector<std::pair<std::string, at::Tensor>> list() const;
  void load(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  /// The number of this reduction.
  std::int64_t begin(const GradientBucket& bucket);
  bool compresses(const at::Tensor& gradient) const;
  Matrix matrix_of(const GradientBucket& bucket, std::size_t gradient, std::int64_t iteration);
  at::Tensor spare(const Matrix& matrix, std::int64_t iteration, std::int64_t rows) const;
  /// Sums P over the ranks; waits for it. Returns the orthonormalized part of each matrix.
  std::vector<at::Tensor> sum_p(const std::vector<Matrix>& matrices, std::int64_t iteration,
                                const collective::Group& group);
  void keep(const Matrix& matrix, const at::Tensor& q, const at::Tensor& average);
  void count(const at::Tensor& sent);

  const PowerSgdOptions options_;
  mutable Mutex mutex_;
  std::int64_t iteration_ TORCHSPAN_GUARDED_BY(mutex_) = 0;
  Traffic traffic_ TORCHSPAN_GUARDED_BY(mutex_);
  StateTensors errors_ TORCHSPAN_GUARDED_BY(mutex_);
  StateTensors factors_ TORCHSPAN_GUARDED_BY(mutex_);
};

std::int64_t PowerSgd::State::begin(const GradientBucket& bucket) {
  MutexLock lock(mutex_);
  if (bucket.index == 0) ++iteration_;
  const auto bytes = static_cast<std::uint64_t>(bucket.buffer.is_sparse() ? 0 : bucket.buffer.nbytes());
  traffic_.gradients += bytes;
  return iteration_ - 1;
}

bool PowerSgd::State::compresses(const at::Tensor& gradient) const {
  if (gradient.dim() == 0 || gradient.numel() == 0) return false;
  const std::int64_t rows = gradient.size(0), columns = gradient.numel() / rows;
  return static_cast<double>(rows + columns) * options_.rank * options_.min_compression_rate <
         static_cast<double>(gradient.numel());
}

at::Tensor PowerSgd::State::spare(const Matrix& matrix, std::int64_t iteration, std::int64_t rows) const {
  return random_matrix(options_.seed, iteration, matrix.name, rows, matrix.q.size(1))
      .to(matrix.input.options());
}

Matrix PowerSgd::State::matrix_of(const GradientBucket& bucket, std::size_t gradient,
                                  std::int64_t iteration) {
  Matrix matrix{bucket.parameters[gradient], bucket.gradients[gradient], {}, {}};
  const at::Tensor flat = matrix.gradient.detach().reshape({matrix.gradient.size(0), -1});
  matrix.input = flat.to(dtype_of_factors(flat.scalar_type()), /*non_blocking=*/false, /*copy=*/true);
  const std::int64_t rows = matrix.input.size(0), columns = matrix.input.size(1);
  const std::int64_t rank = std::min<std::int64_t>({options_.rank, rows, columns});
  at::Tensor error, factor;
  {
    MutexLock lock(mutex_);
    error = find(errors_, matrix.name, {rows, columns});
    factor = find(factors_, matrix.name, {columns, rank});
  }
  if (error.defined()) matrix.input.add_(error.to(matrix.input.options()));
  matrix.q = factor.defined() ? factor.to(matrix.input.options(), /*non_blocking=*/false, /*copy=*/true)
                              : at::zeros({columns, rank}, matrix.input.options());
  orthonormalize(matrix.q, spare(matrix, iteration, columns));
  return matrix;
}

std::vector<at::Tensor> PowerSgd::State::sum_p(const std::vector<Matrix>& matrices, std::int64_t iteration,
                                               const collective::Group& group) {
  std::vector<at::Tensor> p;
  for (const Matrix& matrix : matrices) p.push_back(at::mm(matrix.input, matrix.q));
  const at::Tensor flat = pack(group, p);
  count(flat);
  std::vector<at::Tensor> sums = parts_of(group.all_reduce(flat).wait(), p);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    orthonormalize(sums[i], spare(matrices[i], iteration, sums[i].size(0)));
  }
  return sums;
}

void PowerSgd::State::keep(const Matrix& matrix, const at::Tensor& q, const at::Tensor& average) {
  at::Tensor error = options_.error_feedback ? at::sub(matrix.input, average) : at::Tensor();
  // An overflow of one step, which a GradScaler skips, must not stay in the gradients of all later ones.
  if (error.defined()) error.nan_to_num_(0, 0, 0);
  at::Tensor factor = options_.warm_start ? q.clone() : at::Tensor();
  MutexLock lock(mutex_);
  if (error.defined()) errors_[matrix.name] = std::move(error);
  if (factor.defined()) factors_[matrix.name] = std::move(factor);
}

void PowerSgd::State::count(const at::Tensor& sent) {
  MutexLock lock(mutex_);
  traffic_.sent += static_cast<std::uint64_t>(sent.nbytes());
}

Future<at::Tensor> PowerSgd::State::reduce(const GradientBucket& bucket, const collective::Group& group,
                                           const std::shared_ptr<State>& self) {
  const at::NoGradGuard no_grad;
  const std::int64_t iteration = begin(bucket);
  const bool whole = bucket.buffer.is_sparse() || !bucket.buffer.is_floating_point();
  std::vector<Matrix> matrices;
  std::vector<at::Tensor> others;
  for (std::size_t i = 0; i < bucket.gradients.size() && !whole && iteration >= options_.start_iteration;
       ++i) {
    if (compresses(bucket.gradients[i])) {
      matrices.push_back(matrix_of(bucket, i, iteration));
    } else {
      others.push_back(bucket.gradients[i]);
    }
  }
  if (matrices.empty()) {
    if (!bucket.buffer.is_sparse()) count(bucket.buffer);
    return all_reduce_hook()(bucket, group);
  }
  Future<at::Tensor> whole_ones;
  if (!others.empty()) {
    const at::Tensor flat = pack(group, others).mul_(1 / bucket.divisor);
    count(flat);
    whole_ones = group.all_reduce(flat);
  }
  const std::vector<at::Tensor> p = sum_p(matrices, iteration, group);
  std::vector<at::Tensor> q;
  for (std::size_t i = 0; i < matrices.size(); ++i) q.push_back(at::mm(matrices[i].input.t(), p[i]));
  const at::Tensor flat = pack(group, q).mul_(1 / bucket.divisor);
  count(flat);
  return group.all_reduce(flat).then([self, matrices = std::move(matrices), p, q, others = std::move(others),
                                      whole_ones, buffer = bucket.buffer](const Future<at::Tensor>& sum) {
    const at::NoGradGuard inside;
    const std::vector<at::Tensor> averages = parts_of(sum.wait(), q);
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const at::Tensor average = at::mm(p[i], averages[i].t());
      self->keep(matrices[i], averages[i], average);
      matrices[i].gradient.copy_(average.view(matrices[i].gradient.sizes()));
    }
    if (whole_ones.valid()) keep_for_this_stream({whole_ones.wait()});
    keep_for_this_stream({sum.wait()});
    keep_for_this_stream(p);
    keep_for_this_stream(q);
    for (const Matrix& matrix : matrices) keep_for_this_stream({matrix.input});
    if (whole_ones.valid()) {
      const std::vector<at::Tensor> parts = parts_of(whole_ones.wait(), others);
      for (std::size_t i = 0; i < others.size(); ++i) others[i].copy_(parts[i]);
    }
    return buffer;
  });
}

std::int64_t PowerSgd::State::iteration() const {
  MutexLock lock(mutex_);
  return iteration_;
}

PowerSgd::Traffic PowerSgd::State::traffic() const {
  MutexLock lock(mutex_);
  return traffic_;
}

std::vector<std::pair<std::string, at::Tensor>> PowerSgd::State::list() const {
  MutexLock lock(mutex_);
  std::vector<std::pair<std::string, at::Tensor>> state;
  state.emplace_back(kIteration, at::full({}, iteration_, at::kLong));
  for (const auto& [name, error] : errors_) state.emplace_back(kError + name, error.clone());
  for (const auto& [name, factor] : factors_) state.emplace_back(kFactor + name, factor.clone());
  return state;
}

void PowerSgd::State::load(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  std::int64_t iteration = 0;
  StateTensors errors, factors;
  for (const auto& [name, tensor] : state) {
    if (name == kIteration && tensor.numel() == 1) {
      iteration = tensor.item<std::int64_t>();
    } else if (name.starts_with(kError) && tensor.dim() == 2) {
      errors[name.substr(std::string(kError).size())] = tensor.clone();
    } else if (name.starts_with(kFactor) && tensor.dim() == 2) {
      factors[name.substr(std::string(kFactor).size())] = tensor.clone();
    } else {
      throw_invalid(
          "'{}' is not part of the state of PowerSgd; its entries are iteration, error.<parameter> and "
          "factor.<parameter>",
          name);
    }
  }
  MutexLock lock(mutex_);
  iteration_ = iteration;
  errors_ = std::move(errors);
  factors_ = std::move(factors);
}

PowerSgd::PowerSgd(PowerSgdOptions options) {
  if (options.rank < 1) {
    throw_invalid("PowerSgdOptions::rank is {}; it must be at least 1", options.rank);
  }
  if (options.start_iteration < 0) {
    throw_invalid("PowerSgdOptions::start_iteration is {}; it must not be negative", options.start_iteration);
  }
  if (!(options.min_compression_rate >= 0)) {
    throw_invalid("PowerSgdOptions::min_compression_rate is {}; it must not be negative",
                  options.min_compression_rate);
  }
  state_ = std::make_shared<State>(options);
}

CommHook PowerSgd::hook() const {
  return [state = state_](const GradientBucket& bucket, const collective::Group& group) {
    return state->reduce(bucket, group, state);
  };
}

std::int64_t PowerSgd::iteration() const { return state_->iteration(); }
PowerSgd::Traffic PowerSgd::traffic() const { return state_->traffic(); }
std::vector<std::pair<std::string, at::Tensor>> PowerSgd::state() const { return state_->list(); }
void PowerSgd::load_state(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  state_->load(state);
}

}  // namespace torchspan::data_parallel
