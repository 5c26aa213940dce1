#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

#include <torchspan/rpc/rref.h>
#include <torchspan/rpc/worker.h>

#include "fashion_mnist/server.h"

namespace fashion_mnist {

/// What a client does: classifies the test images, `images` in a call, again and again until version `until` has classified
/// them all.
struct Calls {
  static constexpr torchspan::FixedString kWireName = "Calls";
  std::string data;        ///< folder
  std::int64_t limit = 0;  ///< test images; 0: all
  std::int64_t images = 32;
  std::int64_t until = 0;
};

/// What clients saw of one version.
struct Seen {
  static constexpr torchspan::FixedString kWireName = "Seen";
  std::int64_t version = 0, images = 0, right = 0;
  std::vector<double> seconds;  ///< of each call
};

/// Runs on the clients. Returns the versions in order.
std::vector<Seen> call_server(torchspan::Worker& worker, const torchspan::RRef<Server>& server,
                              const Calls& calls);
inline constexpr torchspan::Function<call_server> kCallServer{"call_server"};

/// Puts together what several clients saw.
std::vector<Seen> merge(const std::vector<std::vector<Seen>>& clients);
/// "version  12:   313 calls, p50 1.52 ms, p99 4.10 ms, accuracy 84.51 %".
std::string describe(const Seen& seen);

}  // namespace fashion_mnist
