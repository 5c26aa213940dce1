#pragma once
#include <optional>
#include <string>

namespace torchspan::testing {

/// This process's place among those that run_over_mpi() started; none in an ordinary run.
struct MpiPlace {
  int rank = 0;
  int size = 1;
  std::string folder;  ///< shared by all of them; holds the file "secret"
};
std::optional<MpiPlace> mpi_place();

/// Runs this program again as `ranks` processes under mpirun, which all run the same tests; its exit code.
int run_over_mpi(int ranks, int argc, char** argv);

}  // namespace torchspan::testing
