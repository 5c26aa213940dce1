#pragma once
#include <cstdint>
#include <string>

#include <torchspan/wire.h>

#include "recommender/ratings.h"

namespace CLI {
class App;
}

namespace recommender {

struct Options {
  static constexpr torchspan::FixedString kWireName = "Options";
  std::string data = kDefaultFile;
  std::int64_t epochs = 5;
  std::int64_t batch = 512;
  std::int64_t seed = 1;
  double lr = 0.02;
};

void add_options(CLI::App& app, Options& options);

}  // namespace recommender
