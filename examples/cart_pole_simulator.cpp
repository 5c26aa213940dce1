// Simulates carts with poles for a program of Python, which learns to balance them (examples/python/cart_pole.py): rank 0 runs
// Python, all others run this program.
//   torchspan run -n 3 sh -c 'if [ $RANK = 0 ]; then exec python examples/python/cart_pole.py; else exec cart_pole_simulator; fi'
#include <CLI/CLI.hpp>
#include <cstdint>
#include <tuple>

#include <ATen/ATen.h>

#include <torchspan/torchspan.h>

#include "cart_pole/physics.h"
#include "programs/run_program.h"

namespace ts = torchspan;

namespace cart_pole {

/// Made and used by Python through a reference.
class Simulator {
 public:
  Simulator(std::int64_t carts, std::int64_t seed) : carts_(carts, static_cast<std::uint64_t>(seed)) {}

  /// Float [carts, 4].
  at::Tensor states() { return carts_.states().to(at::kFloat); }
  /// Pushes each cart, int64 [carts]; returns the states then, and bool [carts]: the pole fell, and: the episode is over.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> push(const at::Tensor& actions) {
    const Carts::Ended ended = carts_.step(actions);
    return {states(), ended.failed, ended.failed | ended.complete};
  }

 private:
  Carts carts_;
};

}  // namespace cart_pole

namespace {

using cart_pole::Simulator;

constexpr ts::Class<Simulator, std::int64_t, std::int64_t> kSimulator{"Simulator"};
constexpr ts::Function<&Simulator::states> kStates{"Simulator.states"};
constexpr ts::Function<&Simulator::push> kPush{"Simulator.push"};

struct Options {};

void run(const Options& /*options*/) {
  ts::FunctionTable functions;
  functions.add(kSimulator, kStates, kPush);
  ts::WorkerOptions options = ts::WorkerOptions::from_env();
  options.require_same_functions = false;  // workers of Python have others
  ts::Session session(options, functions);
  session.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>(
      "cart_pole_simulator", "Simulates carts with poles for a program of Python.", argc, argv,
      [](CLI::App&, Options&) {}, run);
}
