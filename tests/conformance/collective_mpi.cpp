#include "tests/conformance/collective_mpi.h"

#include <cstdlib>
#include <filesystem>
#include <spawn.h>
#include <sys/wait.h>
#include <vector>

#include <torchspan/detail/net/secret.h>

#include "tests/support/processes.h"

namespace torchspan::testing {
int run_over_mpi(int ranks, int argc, char** argv) {
  const TemporaryFolder folder;
  net::Secret::random().write_file(folder.path() + "/secret");
  setenv(kMpiFolder, folder.path().c_str(), 1);
  // Open MPI refuses to run as root, as in a container, without these.
  setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
  setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
  std::vector<std::string> words = {"mpirun",
                                    "--oversubscribe",
                                    "--bind-to",
                                    "none",
                                    "-n",
                                    std::to_string(ranks),
                                    std::filesystem::read_symlink("/proc/self/exe").string()};
  for (int i = 1; i < argc; ++i) words.emplace_back(argv[i]);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = -1;
  if (posix_spawnp(&pid, arguments[0], nullptr, nullptr, arguments.data(), environ) != 0) return 127;
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace torchspan::testing
