#pragma once
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <functional>

#include <ATen/core/ivalue.h>
#include <ATen/Parallel.h>

namespace programs {

/// What the main() of an example does: reads its options, and calls run() with one LibTorch thread, because the workers
/// share the cores. Flushes each line of standard output, which is a pipe to the launcher. Prints an exception after the
/// program's name. Returns the exit code: 2 for wrong options.
template <class Options>
int run_program(const char* name, const char* description, int argc, char** argv,
                void (*add_options)(CLI::App&, Options&), const std::function<void(const Options&)>& run) {
  CLI::App app(description);
  Options options;
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  at::set_num_threads(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name, error.what());
    return 1;
  }
  return 0;
}

}  // namespace programs
