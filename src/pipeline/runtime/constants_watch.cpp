#include "pipeline/runtime/constants_watch.h"

#include <fmt/format.h>

namespace torchspan::pipeline {

ConstantsWatch::ConstantsWatch(const LocalPipeline& local) : local_(local) {
  for (const SharedConstant& constant : local.constants)
    versions_.push_back(static_cast<std::uint32_t>(constant.tensor._version()));
}

void ConstantsWatch::check() const {
  for (std::size_t i = 0; i < versions_.size(); ++i) {
    const SharedConstant& constant = local_.constants[i];
    const bool changed = static_cast<std::uint32_t>(constant.tensor._version()) != versions_[i];
    if (!changed && !constant.tensor.requires_grad()) continue;
    throw Error(ErrorKind::kInvalid,
                fmt::format("layers of pipeline '{}' on different workers share a tensor, which {} on worker "
                            "'{}' only: {}. Each worker has its own copy: give these stages one owner "
                            "(PipelineOptions::workers), or give each layer its own tensor",
                            local_.options.name, changed ? "a step changed" : "was made to require gradients",
                            local_.worker.name(), constant.holders))
        .with_worker(local_.worker.name());
  }
}

}  // namespace torchspan::pipeline
