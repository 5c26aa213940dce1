#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <random>
#include <string>

#include <torchspan/detail/rpc/extension.h>
#include <torchspan/rpc/worker.h>

namespace torchspan::soak {

/// The functions that the workers of the soak test call on each other.
FunctionTable functions();

/// Whether this worker must end its calls and leave the world.
struct Finish final : rpc::Extension {
  void attach(rpc::Registrar&) override {}
  std::atomic<bool> asked{false};
};
void finish(Worker& worker);

/// How random calls ended.
struct Outcomes {
  std::atomic<std::uint64_t> good{0};
  std::array<std::atomic<std::uint64_t>, 9> failed{};  ///< by ErrorKind
  std::atomic<std::uint64_t> wrong{0};                 ///< impossible values or errors
  std::atomic<std::uint64_t> stuck{0};                 ///< futures that outlived their deadline by far
  std::string str() const;
};

/// Makes random calls to the present workers until the deadline, and waits for every one of them. The
/// sequence comes from `seed`; the outcomes do not.
void make_traffic(Worker& worker, std::uint64_t seed, Deadline until, Outcomes& outcomes);

inline constexpr Function<finish> kFinish{"finish"};

}  // namespace torchspan::soak
