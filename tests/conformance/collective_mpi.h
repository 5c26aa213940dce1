#pragma once
#include <cstdlib>
#include <optional>
#include <string>

namespace torchspan::testing {

inline constexpr const char* kMpiFolder = "TORCHSPAN_TEST_MPI_FOLDER";

/// This process's rank among those that run_over_mpi() started; empty in an ordinary run.
struct MpiPlace {
  int rank = 0;
  int size = 1;
  std::string folder;  ///< shared by all of them; contains the file "secret"
};
inline std::optional<MpiPlace> mpi_place() {
  const char* folder = std::getenv(kMpiFolder);
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  const char* size = std::getenv("OMPI_COMM_WORLD_SIZE");
  if (folder == nullptr || rank == nullptr || size == nullptr) return std::nullopt;
  return MpiPlace{std::atoi(rank), std::atoi(size), folder};
}

/// Runs this program again as `ranks` processes under mpirun, which all run the same tests; returns its exit
/// code.
int run_over_mpi(int ranks, int argc, char** argv);

}  // namespace torchspan::testing
