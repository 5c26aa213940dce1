#pragma once
// LibTorch's own process group over NCCL, where the tests are built with its headers and NCCL's.
#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <torchspan/collective.h>

#include "tests/support/on_cuda.h"

#ifdef TORCHSPAN_TEST_TORCH_NCCL
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace torchspan::testing {

/// Why there is no such process group here; empty if there is.
inline std::string torch_nccl_missing() {
#ifdef TORCHSPAN_TEST_TORCH_NCCL
  return on_cuda() ? "" : "LibTorch's NCCL needs CUDA devices";
#else
  return "the test needs LibTorch 2.7 for CUDA, and nccl.h";
#endif
}

/// Makes this rank's part. Processes meet through a file of the test's folder; `ranks` names it, so each group of several
/// ranks of a test needs other ranks.
inline c10::intrusive_ptr<c10d::ProcessGroup> make_torch_nccl(const std::vector<int>& ranks, int rank) {
#ifdef TORCHSPAN_TEST_TORCH_NCCL
  std::string file = std::string(std::getenv("TORCHSPAN_RUNTIME_DIR")) + "/nccl";
  for (const int member : ranks) file += "_" + std::to_string(member);
  const int size = static_cast<int>(ranks.size());
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  if (size > 1) store = c10::make_intrusive<c10d::FileStore>(file, size);
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::minutes(10);  // the group's own timeout comes first
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::NCCL,
                    c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::NCCL);
  return group;
#else
  static_cast<void>(ranks);
  static_cast<void>(rank);
  return {};
#endif
}

}  // namespace torchspan::testing
