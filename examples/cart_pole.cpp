// Learns to balance a pole on a cart. Rank 0 has the policy; all other workers simulate carts and ask it for actions at
// every time step. It answers when all have asked, with one forward for all carts:
//   torchspan run -n 3 cart_pole
// With one worker, the program does the same in one process.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/observation.h>
#include <torchspan/torchspan.h>

#include "cart_pole/agent.h"
#include "cart_pole/physics.h"
#include "programs/run_program.h"

namespace ts = torchspan;
using namespace cart_pole;

namespace {

struct Options {
  std::int64_t rounds = 40, steps = 500, carts = 8;
  std::uint64_t seed = 1;
  double lr = 0.003;
};

/// What an actor does in a round.
struct Play {
  static constexpr ts::FixedString kWireName = "Play";
  std::int64_t actor = 0, steps = 0, carts = 0;
  std::uint64_t seed = 0;
};

void add_options(CLI::App& app, Options& options) {
  constexpr std::int64_t kOne = 1, kMost = 1'000'000;
  app.add_option("--rounds", options.rounds, "times that the policy is improved")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "time steps of a round; episodes end after 500")
      ->check(CLI::Range(std::int64_t{2}, kMost))
      ->capture_default_str();
  app.add_option("--carts", options.carts, "carts of all actors together")
      ->check(CLI::Range(kOne, kMost))
      ->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_option("--lr", options.lr)->check(CLI::Range(1e-9, 1e3))->capture_default_str();
}

/// Runs on the actors: one round, with an action from the agent at each step.
Rollout play(ts::Worker& worker, const ts::RRef<Agent>& agent, const Play& mine) {
  Carts carts(mine.carts, mine.seed);
  std::vector<at::Tensor> states{carts.states().to(at::kFloat)}, actions, failed, over;
  for (std::int64_t step = 0; step < mine.steps; ++step) {
    actions.push_back(worker.rpc_sync(agent.owner(), kSelectActions, agent, mine.actor, states.back()));
    const Carts::Ended ended = carts.step(actions.back());
    failed.push_back(ended.failed);
    over.push_back(ended.failed | ended.complete);
    states.push_back(carts.states().to(at::kFloat));
  }
  return {at::stack(states), at::stack(actions), at::stack(failed), at::stack(over)};
}
constexpr ts::Function<play> kPlay{"play"};

/// All workers but the agent's are actors, unless it is alone.
std::int64_t actors_of(ts::Session& session) { return std::max(1, session.world_size() - 1); }

/// Lets all actors play a round; returns what they saw.
Rollout play_round(ts::Session& session, const ts::RRef<Agent>& agent, const Options& options,
                   std::int64_t round) {
  const std::int64_t count = actors_of(session);
  std::vector<ts::Future<Rollout>> games;
  for (std::int64_t actor = 0; actor < count; ++actor) {
    const Play part{actor, options.steps, options.carts / count + (actor < options.carts % count ? 1 : 0),
                    options.seed * 1'000'003 + static_cast<std::uint64_t>(round * count + actor)};
    games.push_back(
        session.worker()
            .with({.timeout = std::chrono::hours(1)})
            .rpc_async(static_cast<int>(actor) + (session.world_size() > 1 ? 1 : 0), kPlay, agent, part));
  }
  return join(ts::when_all(games).wait());
}

void learn(ts::Session& session, const Options& options) {
  const std::int64_t actors = actors_of(session);
  if (options.carts < actors) {
    throw ts::Error(ts::ErrorKind::kInvalid,
                    fmt::format("--carts {}: each of the {} actors needs one", options.carts, actors));
  }
  at::manual_seed(options.seed);
  const Agent agent(session.worker(), AgentOptions{.actors = actors, .seed = options.seed, .lr = options.lr});
  const ts::RRef<Agent> reference(session.worker(), agent);
  fmt::print("{} carts on {} {}, policy on {}\n", options.carts, actors, actors == 1 ? "actor" : "actors",
             session.worker().name());
  ts::Progress progress(session);
  ts::ProgressReport shown;
  shown.steps = options.rounds;
  shown.unit = "time steps";
  std::vector<double> lengths;
  for (std::int64_t round = 1; round <= options.rounds; ++round) {
    const Rollout rollout = play_round(session, reference, options, round);
    const double loss = agent.ptr()->learn(rollout);
    lengths.push_back(rollout.episode_length());
    ts::log_scalar(session, "episode length", lengths.back(), round);
    shown.step = round;
    shown.loss = loss;
    shown.rate =
        static_cast<double>(round * options.steps * options.carts) / ts::to_seconds(progress.elapsed());
    shown.text = fmt::format("episodes last {:.0f} steps", lengths.back());
    progress.report(shown);
  }
  const double seconds = ts::to_seconds(progress.elapsed());
  progress.finish();
  fmt::print("mean length of an episode, in steps of 20 ms (at most {}):\n{}", kLongestEpisode,
             draw_curve(lengths));
  fmt::print("{} rounds in {:.1f} s: {:.0f} forwards/s, each for {} carts\n", options.rounds, seconds,
             static_cast<double>(options.rounds * options.steps) / seconds, options.carts);
}

void run(const Options& options) {
  ts::FunctionTable functions;
  functions.add(kSelectActions, kPlay);
  ts::Session session(ts::WorkerOptions::from_env(), functions);
  session.run([&](ts::Session& running) {
    if (running.rank() == 0) learn(running, options);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return programs::run_program<Options>("cart_pole", "Learns to balance a pole on a cart.", argc, argv,
                                        add_options, run);
}
