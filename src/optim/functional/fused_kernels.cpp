#include "optim/functional/fused_kernels.h"

#include <cmath>
#include <type_traits>

// The loops are compiled for the instructions that every processor of the platform has and, on x86-64, once more for
// AVX2; run_best() chooses where the program runs. Everything that a loop calls must be inlined into it.
#define TORCHSPAN_INLINE __attribute__((always_inline)) inline

#if defined(__clang__)
#define TORCHSPAN_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define TORCHSPAN_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace torchspan::optim {
namespace {

template <class T>
using State = std::array<T*, 3>;

template <class Element, class T>
TORCHSPAN_INLINE void loop(const Element& constants, const FusedBuffers<T>& on) {
  const Element element = constants;
  T* const parameter = on.parameter;
  const T* const gradient = on.gradient;
  const State<T> state = on.state;
  const std::size_t count = on.count;
  TORCHSPAN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) element(parameter[i], gradient[i], state, i);
}

#if defined(__x86_64__)
template <class Element, class T>
__attribute__((target("avx2"))) void run_avx2(const Element& element, const FusedBuffers<T>& on) {
  loop(element, on);
}
#endif

template <class Element, class T>
void run_best(const Element& element, const FusedBuffers<T>& on) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return run_avx2(element, on);
#endif
  loop(element, on);
}

/// Calls `body` with each flag as a std::bool_constant.
template <class F>
void with_flags(F&& body) {
  body();
}
template <class F, class... Flags>
void with_flags(F&& body, bool first, Flags... others) {
  if (first) {
    with_flags([&](auto... constants) { body(std::true_type(), constants...); }, others...);
  } else {
    with_flags([&](auto... constants) { body(std::false_type(), constants...); }, others...);
  }
}

/// The gradient with sign and weight decay applied.
template <class T, bool kDecays>
struct Descent {
  explicit Descent(bool maximize, double weight_decay) : sign(maximize ? -1 : 1), decay(T(weight_decay)) {}
  TORCHSPAN_INLINE T operator()(T parameter, T gradient) const {
    if constexpr (kDecays) return sign * gradient + decay * parameter;
    return sign * gradient;
  }
  T sign, decay;
};

template <class T, bool kMomentum, bool kNesterov, bool kDecays>
struct SgdElement {
  explicit SgdElement(const SgdStep& step)
      : descent(step.maximize, step.weight_decay),
        rate(T(-step.lr)),
        momentum(T(step.momentum)),
        share(T(step.gradient_share)) {}
  TORCHSPAN_INLINE void operator()(T& parameter, T gradient, const State<T>& state, std::size_t i) const {
    T direction = descent(parameter, gradient);
    if constexpr (kMomentum) {
      const T buffer = state[0][i] * momentum + share * direction;
      state[0][i] = buffer;
      direction = kNesterov ? direction + momentum * buffer : buffer;
    }
    parameter = parameter + rate * direction;
  }
  Descent<T, kDecays> descent;
  T rate, momentum, share;
};

template <class T, bool kAmsgrad, bool kDecays>
struct AdamElement {
  explicit AdamElement(const AdamStep& step)
      : descent(step.maximize, step.weight_decay),
        factor(T(step.parameter_factor)),
        rate(T(-step.rate)),
        correction(T(step.correction)),
        eps(T(step.eps)),
        beta1(T(step.beta1)),
        share1(T(1 - step.beta1)),
        beta2(T(step.beta2)),
        share2(T(1 - step.beta2)) {}
  TORCHSPAN_INLINE void operator()(T& parameter, T gradient, const State<T>& state, std::size_t i) const {
    const T direction = descent(parameter, gradient);
    const T mean = state[0][i] * beta1 + share1 * direction;
    const T square = state[1][i] * beta2 + share2 * direction * direction;
    state[0][i] = mean;
    state[1][i] = square;
    T largest = square;
    if constexpr (kAmsgrad) {
      const T before = state[2][i];
      largest = square > before || square != square ? square : before;  // NaN if either is
      state[2][i] = largest;
    }
    const T scale = std::sqrt(largest) / correction + eps;
    parameter = parameter * factor + rate * mean / scale;
  }
  Descent<T, kDecays> descent;
  T factor, rate, correction, eps, beta1, share1, beta2, share2;
};

template <class T, bool kDecays>
struct AdagradElement {
  explicit AdagradElement(const AdagradStep& step)
      : descent(step.maximize, step.weight_decay), rate(T(-step.rate)), eps(T(step.eps)) {}
  TORCHSPAN_INLINE void operator()(T& parameter, T gradient, const State<T>& state, std::size_t i) const {
    const T direction = descent(parameter, gradient);
    const T sum = state[0][i] + direction * direction;
    state[0][i] = sum;
    parameter = parameter + rate * direction / (std::sqrt(sum) + eps);
  }
  Descent<T, kDecays> descent;
  T rate, eps;
};

template <class T, bool kMomentum, bool kCentered, bool kDecays>
struct RmspropElement {
  explicit RmspropElement(const RmspropStep& step)
      : descent(step.maximize, step.weight_decay),
        rate(T(-step.lr)),
        alpha(T(step.alpha)),
        share(T(1 - step.alpha)),
        eps(T(step.eps)),
        momentum(T(step.momentum)) {}
  TORCHSPAN_INLINE void operator()(T& parameter, T gradient, const State<T>& state, std::size_t i) const {
    const T direction = descent(parameter, gradient);
    const T square = state[0][i] * alpha + share * direction * direction;
    state[0][i] = square;
    T variance = square;
    if constexpr (kCentered) {
      T* const means = state[kMomentum ? 2 : 1];
      const T mean = means[i] * alpha + share * direction;
      means[i] = mean;
      variance = variance - mean * mean;
    }
    const T scale = std::sqrt(variance) + eps;
    if constexpr (kMomentum) {
      const T buffer = state[1][i] * momentum + direction / scale;
      state[1][i] = buffer;
      parameter = parameter + rate * buffer;
    } else {
      parameter = parameter + rate * direction / scale;
    }
  }
  Descent<T, kDecays> descent;
  T rate, alpha, share, eps, momentum;
};

template <class T>
void run(const SgdStep& step, const FusedBuffers<T>& on) {
  with_flags(
      [&](auto momentum, auto nesterov, auto decays) {
        run_best(SgdElement < T, momentum, nesterov && momentum, decays > (step), on);
      },
      step.momentum != 0, step.nesterov, step.weight_decay != 0);
}

template <class T>
void run(const AdamStep& step, const FusedBuffers<T>& on) {
  with_flags([&](auto amsgrad, auto decays) { run_best(AdamElement<T, amsgrad, decays>(step), on); },
             step.amsgrad, step.weight_decay != 0);
}

template <class T>
void run(const AdagradStep& step, const FusedBuffers<T>& on) {
  with_flags([&](auto decays) { run_best(AdagradElement<T, decays>(step), on); }, step.weight_decay != 0);
}

template <class T>
void run(const RmspropStep& step, const FusedBuffers<T>& on) {
  with_flags([&](auto momentum, auto centered,
                 auto decays) { run_best(RmspropElement<T, momentum, centered, decays>(step), on); },
             step.momentum != 0, step.centered, step.weight_decay != 0);
}

}  // namespace

template <class Step, class T>
void run_fused(const Step& step, const FusedBuffers<T>& on) {
  run(step, on);
}

template void run_fused(const SgdStep&, const FusedBuffers<float>&);
template void run_fused(const SgdStep&, const FusedBuffers<double>&);
template void run_fused(const AdamStep&, const FusedBuffers<float>&);
template void run_fused(const AdamStep&, const FusedBuffers<double>&);
template void run_fused(const AdagradStep&, const FusedBuffers<float>&);
template void run_fused(const AdagradStep&, const FusedBuffers<double>&);
template void run_fused(const RmspropStep&, const FusedBuffers<float>&);
template void run_fused(const RmspropStep&, const FusedBuffers<double>&);

}  // namespace torchspan::optim
