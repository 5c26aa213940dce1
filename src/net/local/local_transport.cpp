#include <fmt/format.h>

#include <torchspan/net/local.h>

#include "net/local/shared_lane.h"
#include "net/stream/stream_transport.h"

namespace torchspan::net {

std::unique_ptr<Transport> make_local_transport(Executor& executor, Handler& handler,
                                                TransportOptions options, LocalOptions local) {
  if (!is_ring_size(local.ring_bytes)) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("LocalOptions::ring_bytes is {}: take a power of two from 4 KiB to 1 GiB",
                            local.ring_bytes));
  }
  auto share = std::make_shared<LocalShare>(std::move(local));
  return std::make_unique<StreamTransport>(executor, handler, options, [share, options](Role role) {
    return std::make_unique<SharedLane>(share, options, role);
  });
}

}  // namespace torchspan::net
