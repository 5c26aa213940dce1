#include <fcntl.h>
#include <unistd.h>

#include <torchspan/detail/core/executor.h>
#include <torchspan/rendezvous.h>

#include "launch/commands/command_line.h"

int main(int argc, char** argv) {
  // Opens the standard descriptors if they are closed, so that no pipe gets their numbers.
  int descriptor;
  do {
    descriptor = open("/dev/null", O_RDWR | O_CLOEXEC);
  } while (descriptor >= 0 && descriptor <= STDERR_FILENO);
  close(descriptor);
  const auto executor = torchspan::make_executor();
  return torchspan::launch::run_command_line(*executor, {argv + 1, argv + argc},
                                             torchspan::rendezvous::process_environment(),
                                             torchspan::launch::DisplayOptions::from_process());
}
