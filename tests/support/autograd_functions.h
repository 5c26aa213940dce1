#pragma once
#include <vector>

#include <torch/torch.h>

#include <torchspan/detail/autograd/extension.h>

/// Functions that the workers of random programs call on each other (autograd_programs.h).
namespace torchspan::testing {

constexpr std::int64_t kRows = 3, kWidth = 4;

inline at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

/// Parameters on one worker: scale() uses one, look_up() one with sparse gradients, single() one in single
/// precision, and no function uses the last.
struct Store {
  explicit Store(std::int64_t seed) {
    const auto number = static_cast<std::uint64_t>(seed);
    scale_weight = numbers({kWidth}, number).set_requires_grad(true);
    table = numbers({kRows, kWidth}, number + 100).set_requires_grad(true);
    single_weight = numbers({kWidth}, number + 300).to(at::kFloat).set_requires_grad(true);
    unused = numbers({kWidth}, number + 200).set_requires_grad(true);
  }
  at::Tensor scale(const at::Tensor& x) const { return x * scale_weight; }
  at::Tensor look_up(const at::Tensor& x) const { return x + rows(); }
  at::Tensor rows() const {
    return at::embedding(table, at::arange(kRows, at::kLong).flip(0), -1, false, true);
  }
  at::Tensor single(const at::Tensor& x) const { return (x * single_weight).tanh(); }
  std::vector<at::Tensor> parameters() const { return {scale_weight, table, single_weight, unused}; }
  static constexpr const char* kNames[] = {"scale", "table", "single", "unused"};

  at::Tensor scale_weight, table, single_weight, unused;
};

// Functions for other workers to call. All take and return matrices of kRows x kWidth.

inline at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
inline at::Tensor sine(const at::Tensor& a) { return a.sin(); }
inline at::Tensor matrices(const at::Tensor& a, const at::Tensor& b) {
  return a.matmul(b.t()).tanh().matmul(a);
}
inline at::Tensor larger(const at::Tensor& a, const at::Tensor& b) {
  return at::where(a > b, a, std::get<0>(b.sort(1)));
}
inline std::vector<at::Tensor> split(const at::Tensor& a) {
  return {a * 2, a.view({kWidth, kRows}).t().contiguous().view({kRows, kWidth}), a + 1};
}
/// Two views of its argument.
inline std::vector<at::Tensor> halves(const at::Tensor& a) { return {a.narrow(1, 0, 2), a.narrow(1, 2, 2)}; }
/// Two results that do not depend on each other.
inline std::vector<at::Tensor> pair(const at::Tensor& a, const at::Tensor& b) {
  return {a.sin(), b.tanh() * 2};
}
inline at::Tensor detached(const at::Tensor& a) { return a.detach() * 3; }
inline at::Tensor without_grad(const at::Tensor& a) {
  const at::NoGradGuard guard;
  return a * 3;
}
inline at::Tensor in_place(const at::Tensor& a) {
  at::Tensor b = a + 0.5;
  b.mul_(2);
  return b;
}
inline at::Tensor in_place_views(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor y = a + 1;
  y.select(1, 0).mul_(2);
  y.narrow(0, 1, 2).add_(b.narrow(0, 0, 2));
  return y;
}
inline at::Tensor mean_of(const std::vector<at::Tensor>& all) { return at::stack(all).mean(0); }
/// One output needs gradients, one is an integer tensor, one has single precision.
inline std::vector<at::Tensor> mixed(const at::Tensor& a) {
  return {a.cos(), (a > 0).to(at::kLong), a.to(at::kFloat)};
}
inline at::Tensor unite(const at::Tensor& a, const at::Tensor& signs, const at::Tensor& single) {
  return a + signs.to(at::kDouble) + single.to(at::kDouble);
}
/// a + b; its backward returns no gradient for b.
struct Forgetful : torch::autograd::Function<Forgetful> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor& b) {
    return a + b;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};
inline at::Tensor forgetful(const at::Tensor& a, const at::Tensor& b) { return Forgetful::apply(a, b); }

// Functions that call other workers: further ones, or the caller.

at::Tensor onwards(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b);
at::Tensor call_chain(Worker& worker, const std::vector<std::int64_t>& stops, const at::Tensor& a);
at::Tensor by_reference(Worker& worker, const RRef<Store>& store, const at::Tensor& a);
at::Tensor fetch(Worker& worker, const RRef<at::Tensor>& there, const at::Tensor& a);
at::Tensor wasteful(Worker& worker, std::int64_t to, const at::Tensor& a);
std::vector<at::Tensor> gradients_of(Worker& worker, const RRef<Store>& store);
/// Returns how many parameters have a gradient here, in the context of the call.
inline std::int64_t keys_of(Worker& worker) {
  return static_cast<std::int64_t>(autograd::current(worker).gradients().size());
}

constexpr Class<Store, std::int64_t> kStore{"Store"};
constexpr Function<&Store::scale> kScale{"Store.scale"};
constexpr Function<&Store::look_up> kLookUp{"Store.look_up"};
constexpr Function<&Store::single> kSingle{"Store.single"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<sine> kSine{"sine"};
constexpr Function<matrices> kMatrices{"matrices"};
constexpr Function<larger> kLarger{"larger"};
constexpr Function<split> kSplit{"split"};
constexpr Function<halves> kHalves{"halves"};
constexpr Function<pair> kPair{"pair"};
constexpr Function<detached> kDetached{"detached"};
constexpr Function<without_grad> kWithoutGrad{"without_grad"};
constexpr Function<in_place> kInPlace{"in_place"};
constexpr Function<in_place_views> kInPlaceViews{"in_place_views"};
constexpr Function<mean_of> kMeanOf{"mean_of"};
constexpr Function<mixed> kMixed{"mixed"};
constexpr Function<unite> kUnite{"unite"};
constexpr Function<forgetful> kForgetful{"forgetful"};
constexpr Function<onwards> kOnwards{"onwards"};
constexpr Function<call_chain> kCallChain{"call_chain"};
constexpr Function<by_reference> kByReference{"by_reference"};
constexpr Function<fetch> kFetch{"fetch"};
constexpr Function<wasteful> kWasteful{"wasteful"};
constexpr Function<gradients_of> kGradientsOf{"gradients_of"};
constexpr Function<keys_of> kKeysOf{"keys_of"};

inline FunctionTable program_functions() {
  return FunctionTable().add(kStore, kScale, kLookUp, kSingle, kMultiply, kSine, kMatrices, kLarger, kSplit,
                             kHalves, kDetached, kWithoutGrad, kInPlace, kInPlaceViews, kMeanOf, kMixed,
                             kUnite, kForgetful, kOnwards, kCallChain, kByReference, kFetch, kWasteful,
                             kGradientsOf, kKeysOf, kPair);
}

inline at::Tensor onwards(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b) {
  return worker.rpc_sync(to, kMultiply, a.tanh(), b) + a;
}
inline at::Tensor call_chain(Worker& worker, const std::vector<std::int64_t>& stops, const at::Tensor& a) {
  if (stops.empty()) return a.cos();
  const std::vector<std::int64_t> rest(stops.begin() + 1, stops.end());
  return worker.rpc_sync(stops[0], kCallChain, rest, a.sin()) * a;
}
inline at::Tensor by_reference(Worker&, const RRef<Store>& store, const at::Tensor& a) {
  return store.rpc_sync(kScale, a).tanh();
}
inline at::Tensor fetch(Worker&, const RRef<at::Tensor>& there, const at::Tensor& a) {
  return there.to_here() * a;
}
inline at::Tensor wasteful(Worker& worker, std::int64_t to, const at::Tensor& a) {
  worker.rpc_sync(to, kSine, a);
  return worker.rpc_sync(to, kSplit, a)[1] * 2;
}
inline std::vector<at::Tensor> gradients_of(Worker& worker, const RRef<Store>& store) {
  const auto context = autograd::current(worker);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : store.local_value().parameters()) {
    gradients.push_back(context.gradient(parameter));
  }
  return gradients;
}

}  // namespace torchspan::testing
