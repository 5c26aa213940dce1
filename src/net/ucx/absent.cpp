#include "net/ucx/ucx_part.h"

/// Stands in for the UCX transport in a build without it.
namespace torchspan::net {

std::unique_ptr<PolledTransport> make_ucx_part(Executor& /*executor*/, Handler& /*handler*/,
                                               TransportOptions /*options*/, UcxOptions /*ucx*/) {
  throw Error(
      ErrorKind::kUnsupported,
      "this TorchSpan was built without UCX: install UCX's headers (Debian: libucx-dev) and configure "
      "with -DTORCHSPAN_UCX=ON, or use the tls transport");
}

std::unique_ptr<Transport> make_ucx_transport(Executor& executor, Handler& handler, TransportOptions options,
                                              UcxOptions ucx) {
  return make_ucx_part(executor, handler, std::move(options), std::move(ucx));
}

}  // namespace torchspan::net
