#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

namespace torchspan::bench {

/// How the processes of one measurement reach each other.
enum class Way : std::uint8_t {
  kLocal,  ///< what the library selects on one host
  kHosts,  ///< between hosts: TLS here, plain TCP at the peer
  kPlain,  ///< between hosts of an isolated network: plain TCP on both sides
};

/// The place of one process in a measurement.
struct WorkerPlace {
  Way way = Way::kLocal;
  int rank = 0;
  int size = 2;
  std::string folder;              ///< of this measurement only; the processes may meet there
  c10::Device device = c10::kCPU;  ///< of the tensors of both ranks, which one host has
};

/// One library, as the calling process uses it. Rank 1 serves; fan_out also calls the ranks after it. Every
/// verb waits for its results and throws if they are wrong; the caller keeps its tensors.
class Side {
 public:
  virtual ~Side() = default;
  /// Returns n + 1 by a call with one integer.
  virtual void small_call(std::int64_t n) = 0;
  /// x + x.
  virtual void add(const at::Tensor& x) = 0;
  /// Sends x; the reply is the number of its elements.
  virtual void one_way(const at::Tensor& x) = 0;
  /// Sends x and receives it in separate memory.
  virtual void echo(const at::Tensor& x) = 0;
  /// Makes `calls` small calls, with at most 64 of them in flight.
  virtual void in_flight_64(int calls) = 0;
  /// Makes one small call to each of the ranks 1 to 3, concurrently.
  virtual void fan_out_3(std::int64_t n) = 0;
  /// Runs remote(x + x), fetches the value, and releases the reference.
  virtual void remote_use(const at::Tensor& x) = 0;
  /// Shuts down; the other ranks must do so too.
  virtual void leave() = 0;
};

/// Throws unless `right`; the error names `call`.
void expect(bool right, const std::string& call);
/// Reads the first element; waits for the device of `x`.
float first_element(const at::Tensor& x);
/// Compares about twenty elements spread over both tensors, so that an incomplete result is detected without
/// reading all of it. Reads only the first and the last one on a device.
bool alike(const at::Tensor& a, const at::Tensor& b);

/// Joins with TorchSpan.
std::unique_ptr<Side> join_torchspan(const WorkerPlace& place);

}  // namespace torchspan::bench
