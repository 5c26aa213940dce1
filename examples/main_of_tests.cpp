// main() of examples_test: the tests, and in the processes of its ForkServer the examples. Their main() functions are linked
// under other names, as EXAMPLE_PROGRAMS lists them: EXAMPLE(rnn) stands for rnn_main().
#include <cstdio>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <string>

#include "tests/support/fork_server.h"

extern "C" {
#define EXAMPLE(name) int name##_main(int argc, char** argv);
EXAMPLE_PROGRAMS
#undef EXAMPLE
}

namespace {

int run_example(int argc, char** argv) {
  const std::string path = argc == 0 ? "" : argv[0], program = path.substr(path.rfind('/') + 1);
#define EXAMPLE(name) \
  if (program == #name) return name##_main(argc, argv);
  EXAMPLE_PROGRAMS
#undef EXAMPLE
  std::fprintf(stderr, "no example has the name '%s'\n", program.c_str());
  return 127;
}

}  // namespace

int main(int argc, char** argv) {
  torchspan::testing::ForkServer::start(run_example);
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
