#pragma once
#include <cstddef>
#include <cstdint>
#include <fmt/format.h>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/error.h>
#include <torchspan/detail/engine/gradient_sink.h>

#include "engine/api/graph_pass.h"

/// The engine without workers, for tests and benchmarks.
namespace torchspan::engine {

/// One pass's view of a GradientMap, which must outlive it.
class MapSink final : public GradientSink {
 public:
  explicit MapSink(GradientMap& gradients, std::uint64_t pass = 0)
      : GradientSink(pass), gradients_(gradients) {}
  at::Tensor gradient(const at::Tensor& parameter) const override { return gradients_.gradient(parameter); }
  void accumulate(const at::Tensor& parameter, at::Tensor gradient) override {
    gradients_.accumulate(parameter, std::move(gradient));
  }
  void replace(const at::Tensor& parameter, at::Tensor gradient) override {
    gradients_.replace(parameter, std::move(gradient));
  }

 private:
  GradientMap& gradients_;
};

/// Differentiates `roots`, which are in this process, on this thread, and accumulates the gradients of the leaves in
/// `sink`; `.grad` stays as it is. `gradients` has one tensor for each root, or is empty, and then every root must have
/// one element. Returns when the futures held by the sink have completed. Throws the Error of the pass.
inline void backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& gradients,
                     GradientSink& sink, PassOptions options = {}) {
  if (!gradients.empty() && gradients.size() != roots.size()) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("backward() got {} gradients for {} roots: pass one for each root, or none",
                            gradients.size(), roots.size()));
  }
  if (options.threads > 1) {
    throw Error(ErrorKind::kUnsupported,
                "backward() runs its pass on this thread only: for several threads use a GraphPass or a "
                "distributed context");
  }
  GraphPass pass(sink, std::move(options));
  for (std::size_t i = 0; i < roots.size(); ++i) {
    pass.add_root(roots[i], gradients.empty() ? at::Tensor() : gradients[i]);
  }
  pass.prepare();
  pass.run();
  sink.end()->wait();
}

}  // namespace torchspan::engine
