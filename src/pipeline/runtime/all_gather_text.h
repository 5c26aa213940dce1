#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include <torchspan/rpc/worker.h>

namespace torchspan::pipeline {

/// The most bytes that a worker contributes to one Worker::all_gather_bytes().
inline constexpr std::size_t kMostBytes = std::size_t{1} << 16;

/// Returns the texts of all `workers`, of any length, in their order. Collective over `workers`; exchanges pieces of at
/// most kMostBytes, each for at most `limit`, until no worker has another one.
std::vector<std::string> all_gather_text(const Worker& worker, const std::string& mine,
                                         const std::vector<std::string>& workers, Duration limit);

}  // namespace torchspan::pipeline
