#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/ivalue.h>

namespace torchspan::bench {

/// How the processes of one measurement reach each other.
enum class Way : std::uint8_t {
  kLocal,  ///< what the library takes by itself on one host
  kHosts,  ///< what it takes between hosts: TLS here, plain TCP at the peer
};

/// Where one process of a measurement stands.
struct WorkerPlace {
  Way way = Way::kLocal;
  int rank = 0;
  int size = 2;
  std::string folder;  ///< of this measurement alone; the processes may meet there
};

/// One library, seen from the process that calls. Rank 1 serves; fan_out also asks the ranks after it. Every
/// verb waits for its results, checks them and throws when they are wrong; the caller keeps its tensors.
class Side {
 public:
  virtual ~Side() = default;
  /// n + 1, by an integer's way there and back.
  virtual void small_call(std::int64_t n) = 0;
  /// x + x.
  virtual void add(const at::Tensor& x) = 0;
  /// Sends x; what comes back is the number of its elements.
  virtual void one_way(const at::Tensor& x) = 0;
  /// Sends x and gets it back, in memory of its own.
  virtual void echo(const at::Tensor& x) = 0;
  /// `calls` small calls, never more than 64 of them under way.
  virtual void in_flight_64(int calls) = 0;
  /// One small call to each of the ranks 1 to 3, all at once.
  virtual void fan_out_3(std::int64_t n) = 0;
  /// remote(x + x), then its value, then lets the reference go.
  virtual void remote_use(const at::Tensor& x) = 0;
  /// Leaves in order; the other ranks must do so too.
  virtual void leave() = 0;
};

/// Throws when `got` is not what was expected of `call`.
void expect(bool right, const std::string& call);
/// Whether a few values, spread over the whole of both, are the same: a result that was never filled in is
/// found out without reading all of it.
bool alike(const at::Tensor& a, const at::Tensor& b);

/// Joins as the library of this repository.
std::unique_ptr<Side> join_torchspan(const WorkerPlace& place);

}  // namespace torchspan::bench
