#pragma once
#include <gtest/gtest.h>

#include "tests/conformance/collective_devices.h"
#include "tests/conformance/collective_oracle.h"
#include "tests/conformance/collective_world.h"

namespace torchspan::testing {

/// One row of the suite: a backend and a number of ranks.
struct CollectiveRow {
  collective::BackendKind backend;
  int ranks;
  int hosts = 1;
  collective::Network network = collective::Network::kIsolated;
  bool tls = false;  ///< the ranks connect over TLS, as between hosts

  /// Whether sums add ranks 0 to P-1 in this order, to the bit.
  bool in_rank_order() const {
    return ranks == 1 || backend == collective::BackendKind::kSharedMemory ||
           backend == collective::BackendKind::kCudaIpc || backend == collective::BackendKind::kNetwork;
  }
};

inline std::string name_of(collective::BackendKind kind) {
  switch (kind) {
    case collective::BackendKind::kAutomatic:
      return "automatic";
    case collective::BackendKind::kSharedMemory:
      return "shm";
    case collective::BackendKind::kC10d:
      return "c10d";
    case collective::BackendKind::kMpi:
      return "mpi";
    case collective::BackendKind::kHierarchical:
      return "hierarchical";
    case collective::BackendKind::kNccl:
      return "nccl";
    case collective::BackendKind::kCudaIpc:
      return "cuda_ipc";
    case collective::BackendKind::kNetwork:
      return "network";
  }
  return "unknown";
}

/// The list of backends: one line each.
inline std::vector<CollectiveRow> collective_rows() {
  std::vector<CollectiveRow> rows;
  if (const auto mpi = mpi_place()) return {{collective::BackendKind::kMpi, mpi->size}};
  for (const int ranks : {1, 2, 3, 4, 8}) {
    rows.push_back({collective::BackendKind::kSharedMemory, ranks});
  }
  // On the stand-in device, over doubles of NCCL and of CUDA's memory handles.
  for (const int ranks : {2, 3}) rows.push_back({collective::BackendKind::kNccl, ranks});
  for (const int ranks : {2, 3, 4}) rows.push_back({collective::BackendKind::kCudaIpc, ranks});
  const auto encrypted = collective::Network::kEncrypted;
  for (const int ranks : {1, 2, 3, 8}) {
    rows.push_back({collective::BackendKind::kNetwork, ranks, /*hosts=*/1, encrypted});
  }
  for (const int ranks : {2, 3}) {
    rows.push_back({collective::BackendKind::kNetwork, ranks, /*hosts=*/2, encrypted, /*tls=*/true});
  }
  for (const int ranks : {2, 3, 5}) {
    rows.push_back({collective::BackendKind::kHierarchical, ranks, /*hosts=*/2, encrypted});
  }
#if defined(TORCHSPAN_GLOO)
  for (const int ranks : {2, 3, 4}) rows.push_back({collective::BackendKind::kC10d, ranks});
  for (const int ranks : {2, 3, 5})
    rows.push_back({collective::BackendKind::kHierarchical, ranks, /*hosts=*/2});
#endif
  return rows;
}

/// The rows with so many ranks: one or more of each backend for 2 and 3. Three ranks suffice where the code does not depend
/// on their number: one is late or dead, or calls something else, and two others notice it.
inline std::vector<CollectiveRow> rows_of(int ranks) {
  std::vector<CollectiveRow> rows = collective_rows();
  std::erase_if(rows, [=](const CollectiveRow& row) { return row.ranks != ranks; });
  return rows;
}

inline std::string row_name(const ::testing::TestParamInfo<CollectiveRow>& info) {
  const CollectiveRow& row = info.param;
  const bool gloo =
      row.backend == collective::BackendKind::kHierarchical && row.network == collective::Network::kIsolated;
  return name_of(row.backend) + (gloo ? "_gloo" : row.tls ? "_tls" : "") + "_" + std::to_string(row.ranks);
}

/// A test that runs on every row.
class CollectiveSuite : public ::testing::TestWithParam<CollectiveRow> {
 protected:
  CollectiveSuite() : world_(GetParam().ranks, GetParam().hosts, GetParam().tls) {
    world_.make_group = make_group_of_suite;
  }
  int ranks() const { return GetParam().ranks; }
  collective::GroupOptions options() const {
    return {.backend = GetParam().backend, .network = GetParam().network};
  }
  /// Whether a result equals the oracle's: to the bit, if the backend promises that.
  static bool is_right(const at::Tensor& result, const at::Tensor& oracle) {
    if (GetParam().in_rank_order() ||
        !(at::isFloatingType(oracle.scalar_type()) || at::isComplexType(oracle.scalar_type()))) {
      return same_bits(result, oracle);
    }
    const double tolerance = oracle.element_size() <= 2 ? 1e-2 : 1e-4;
    return result.sizes() == oracle.sizes() && at::allclose(result, oracle, tolerance, tolerance);
  }
  void run(std::function<void(collective::Group&)> body) { world_.run(std::move(body), options()); }
  /// random_inputs() of all ranks. Do not write to them.
  SharedInputs inputs_of_ranks(at::IntArrayRef sizes, at::ScalarType dtype, std::uint64_t seed) {
    return inputs_.get(ranks(), sizes, dtype, seed);
  }
  /// Whether all sizes are tested with this root: the first and the last one. Large tensors take long, and the code for
  /// them does not depend on the root between those.
  bool is_outer(int root) const { return root == 0 || root == ranks() - 1; }

  CollectiveWorld world_;
  InputsOfRanks inputs_;
};

}  // namespace torchspan::testing
