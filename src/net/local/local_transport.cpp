#include "net/local/local_transport.h"

#include "core/api/throw_invalid.h"
#include "net/local/shared_lane.h"
#include "net/receive_buffers.h"

namespace torchspan::net {

std::unique_ptr<StreamTransport> make_local_part(Executor& executor, Handler& handler,
                                                 TransportOptions options, LocalSetup setup) {
  const LocalOptions& local = setup.options;
  if (!is_ring_size(local.ring_bytes)) {
    throw_invalid("LocalOptions::ring_bytes is {}: use a power of two from 4 KiB to 1 GiB", local.ring_bytes);
  }
  auto share = std::make_shared<LocalShare>(std::move(setup.options), std::move(setup.faults));
  options = with_receive_buffers(std::move(options));
  return std::make_unique<StreamTransport>(executor, handler, options, [share, options](Role role) {
    return std::make_unique<SharedLane>(share, options, role);
  });
}

std::unique_ptr<Transport> make_local_transport(Executor& executor, Handler& handler,
                                                TransportOptions options, LocalOptions local) {
  return make_local_part(executor, handler, std::move(options), {.options = std::move(local)});
}

}  // namespace torchspan::net
