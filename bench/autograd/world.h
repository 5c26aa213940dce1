#pragma once
#include <string>

#include "bench/autograd/turns.h"

namespace torchspan::bench {

/// The measured worlds: "pair" is a caller and a worker, "chain" four workers each of which calls the next,
/// "trainers" three trainers (ranks 0 to 2) and four parameter servers. bench/peers/torch_dist_autograd.py
/// runs the same programs.
inline constexpr int kTrainers = 3, kServers = 4;

/// Takes part in such a world with the rank in the environment. Rank 0 returns the figures, those of passes
/// as "<figure>/smart" and "<figure>/fast"; each figure takes about `limit`.
Samples take_part(const std::string& world, Duration limit);

}  // namespace torchspan::bench
