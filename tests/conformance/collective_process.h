#pragma once
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torchspan/collective.h>
#include <torchspan/rendezvous.h>

#include "rendezvous/api/environment.h"
#include "tests/conformance/collective_backends.h"
#include "tests/support/cluster_main.h"

namespace torchspan::testing {

/// The rank that dies in the scenarios of this suite.
inline constexpr int kVictim = 1;

inline collective::GroupOptions shared_memory() {
  return {.backend = collective::BackendKind::kSharedMemory, .timeout = std::chrono::seconds(60)};
}

/// Joins the world that the environment describes, on the host TEST_HOST if that is set.
inline void with_world(const std::function<void(Runtime&, rendezvous::Membership&)>& body) {
  const auto executor = make_executor();
  const auto environment = rendezvous::read_environment(rendezvous::process_environment());
  Runtime runtime(*executor, environment.name);
  rendezvous::MembershipOptions join;
  join.name = environment.name;
  join.rank = environment.rank;
  join.world_size = environment.world_size;
  join.store_address = environment.store_address();
  join.address = "unix:/none";
  join.job = environment.job;
  if (const char* host = std::getenv("TEST_HOST")) join.host_id = host;
  const auto world = rendezvous::Membership::join(
      runtime, rendezvous::stream_transports(*executor, rendezvous::load_secret(environment)), join);
  body(runtime, *world);
}

/// The same with a group of all ranks.
inline void with_group(const collective::GroupOptions& options,
                       const std::function<void(collective::Group&, Executor&)>& body) {
  with_world([&](Runtime& runtime, rendezvous::Membership& world) {
    collective::Group group = make_group_of_suite(runtime, world, options);
    body(group, runtime.executor);
  });
}

/// The error that every surviving rank must see.
inline void expect_error(ErrorKind kind, const std::vector<std::string>& words,
                         const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    require(error.kind() == kind, text);
    for (const std::string& word : words)
      require(text.find(word) != std::string::npos, word + " in: " + text);
    return;
  }
  throw std::runtime_error("nothing was thrown");
}

/// The places in an operation at which a rank may die, by name: the scenarios of collective_phases.cpp.
std::map<std::string, Scenario> phase_scenarios();

}  // namespace torchspan::testing
