#include "pipeline/layers/random.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/pipeline.h>
#include <torchspan/wire.h>

#include "device/api/devices.h"

namespace torchspan::pipeline {

RandomState RandomState::capture() {
  std::vector<One> states;
  for (device::NamedGenerator& each : device::default_generators()) {
    at::Tensor state = device::state_of(each.generator);
    states.push_back({std::move(each.generator), std::move(state)});
  }
  return RandomState(std::move(states));
}

void RandomState::restore() const {
  for (const One& each : states_) device::set_state(each.generator, each.state);
}

std::uint64_t seed_of_use(std::uint64_t seed, std::uint64_t step, int order, int micro_batch) {
  const std::uint64_t words[] = {seed, step, static_cast<std::uint64_t>(order),
                                 static_cast<std::uint64_t>(micro_batch)};
  return wire::digest({reinterpret_cast<const char*>(words), sizeof words});
}

std::uint64_t seed_of_layer(std::uint64_t seed, int layer) {
  const std::uint64_t words[] = {seed, static_cast<std::uint64_t>(layer)};
  return wire::digest({reinterpret_cast<const char*>(words), sizeof words});
}

SeededScope::SeededScope(std::optional<std::uint64_t> seed) {
  if (!seed) return;
  outer_.emplace();
  for (const device::NamedGenerator& each : device::default_generators())
    device::set_seed(each.generator, *seed);
}

std::uint64_t draw_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

}  // namespace torchspan::pipeline
