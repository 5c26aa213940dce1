#pragma once
#include <memory>
#include <string>

#include <torchspan/detail/core/runtime.h>

namespace torchspan {

/// A runtime on the executor of real threads, which ends with the last handle.
inline std::shared_ptr<Runtime> make_own_runtime(const std::string& owner, LogLevel level) {
  struct Ground {
    Ground(const std::string& owner, LogLevel level)
        : executor(make_executor()), runtime(*executor, owner, level) {}
    const std::unique_ptr<Executor> executor;
    Runtime runtime;
  };
  const auto ground = std::make_shared<Ground>(owner, level);
  return {ground, &ground->runtime};
}

}  // namespace torchspan
