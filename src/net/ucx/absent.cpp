#include <torchspan/net/ucx.h>

/// Stands in for the UCX transport in a build without it.
namespace torchspan::net {

std::unique_ptr<Transport> make_ucx_transport(Executor& /*executor*/, Handler& /*handler*/,
                                              TransportOptions /*options*/, UcxOptions /*ucx*/) {
  throw Error(
      ErrorKind::kUnsupported,
      "this TorchSpan was built without UCX: install UCX's headers (Debian: libucx-dev) and configure "
      "with -DTORCHSPAN_UCX=ON, or use the tls transport");
}

}  // namespace torchspan::net
