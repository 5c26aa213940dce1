#pragma once
#include <gtest/gtest.h>

#include "tests/conformance/collective_world.h"

namespace torchspan::testing {

/// One row of the suite: a back end, and how many ranks.
struct CollectiveRow {
  collective::BackEndKind back_end;
  int ranks;
};

inline std::string name_of(collective::BackEndKind kind) {
  switch (kind) {
    case collective::BackEndKind::kAutomatic: return "automatic";
    case collective::BackEndKind::kSharedMemory: return "shm";
    case collective::BackEndKind::kC10d: return "c10d";
    case collective::BackEndKind::kMpi: return "mpi";
    case collective::BackEndKind::kHierarchical: return "hierarchical";
  }
  return "unknown";
}

/// The list of back ends: one line each.
inline std::vector<CollectiveRow> collective_rows() {
  std::vector<CollectiveRow> rows;
  for (const int ranks : {1, 2, 3, 4, 8}) {
    rows.push_back({collective::BackEndKind::kSharedMemory, ranks});
  }
  return rows;
}

inline std::string row_name(const ::testing::TestParamInfo<CollectiveRow>& info) {
  return name_of(info.param.back_end) + "_" + std::to_string(info.param.ranks);
}

/// A test that runs on every row.
class CollectiveSuite : public ::testing::TestWithParam<CollectiveRow> {
 protected:
  CollectiveSuite() : world_(GetParam().ranks) {}
  int ranks() const { return GetParam().ranks; }
  collective::GroupOptions options() const { return {.back_end = GetParam().back_end}; }
  void run(std::function<void(collective::Group&)> body) { world_.run(std::move(body), options()); }

  CollectiveWorld world_;
};

}  // namespace torchspan::testing
