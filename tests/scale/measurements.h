#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torchspan/core/time.h>

#include "net/api/sim.h"

/// What worlds of many simulated workers cost. The tests measure the sizes in TORCHSPAN_SCALE_WORKERS (default
/// "64 128") and assert how the costs grow; with TORCHSPAN_SCALE_OUT, they append one line of JSON per
/// measurement to that file, from which tools/scale-report makes the plots of docs/architecture/scale.md.
namespace torchspan::testing::scale {

/// The sizes of worlds to measure, at most `most`.
inline std::vector<int> world_sizes(int most = 1 << 20) {
  const char* given = std::getenv("TORCHSPAN_SCALE_WORKERS");
  std::istringstream words(given != nullptr ? given : "64 128");
  std::vector<int> sizes;
  for (int size = 0; words >> size;) {
    if (size <= most) sizes.push_back(size);
  }
  return sizes;
}

inline double log2_of(int workers) { return std::ceil(std::log2(workers)); }
inline double microseconds_of(Duration time) { return 1e6 * to_seconds(time); }

/// Prints a measurement and appends it to the file.
inline void record(std::string_view what, int workers,
                   const std::vector<std::pair<const char*, double>>& values) {
  std::string line = fmt::format(R"({{"what": "{}", "workers": {})", what, workers);
  for (const auto& [name, value] : values) line += fmt::format(R"(, "{}": {:.6g})", name, value);
  line += "}";
  std::puts(line.c_str());
  std::fflush(stdout);
  if (const char* file = std::getenv("TORCHSPAN_SCALE_OUT"))
    std::ofstream(file, std::ios::app) << line << '\n';
}

/// Messages on a simulated network since the last take(). For simulated threads of one network.
class Traffic {
 public:
  struct Counts {
    double messages = 0, bytes = 0;                ///< of all
    double store_messages = 0, store_bytes = 0;    ///< sent by the store
    double direct_messages = 0, direct_bytes = 0;  ///< between workers
  };
  explicit Traffic(net::SimNetwork& network) {
    network.observe([this](const net::SimMessage& message) {
      ++counts_.messages;
      counts_.bytes += static_cast<double>(message.size);
      const bool from_store = message.from == "sim:store";
      if (!from_store && message.to == "sim:store") return;
      ++(from_store ? counts_.store_messages : counts_.direct_messages);
      (from_store ? counts_.store_bytes : counts_.direct_bytes) += static_cast<double>(message.size);
    });
  }
  Counts take() { return std::exchange(counts_, {}); }

 private:
  Counts counts_;
};

}  // namespace torchspan::testing::scale
