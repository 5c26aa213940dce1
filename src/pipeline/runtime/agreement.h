#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <torchspan/core/error.h>
#include <torchspan/core/future.h>
#include <torchspan/rpc/worker.h>

#include "core/api/agreement.h"

/// What all workers of a pipeline compare and decide while they create it.
namespace torchspan::pipeline {

/// Limit of each exchange of workers that create a pipeline.
inline constexpr Duration kCreationTimeout = std::chrono::minutes(5);

/// The most bytes that a worker contributes to one Worker::all_gather_bytes().
inline constexpr std::size_t kMostBytes = std::size_t{1} << 16;

/// PipelineOptions::while_waiting: called about once a second on the waiting thread; what it throws ends the wait here.
using WhileWaiting = std::function<void()>;

/// Waits for `future`.
template <class T>
T wait_for(const Future<T>& future, const WhileWaiting& while_waiting) {
  while (while_waiting && !future.wait_for(std::chrono::seconds(1))) while_waiting();
  return future.wait();
}

/// Worker::all_gather_bytes() with `while_waiting`.
std::vector<Bytes> all_gather_bytes(const Worker& worker, const Bytes& mine,
                                    const std::vector<std::string>& workers, Duration limit,
                                    const WhileWaiting& while_waiting);

/// Returns the texts of all `workers`, of any length, in their order. Collective over `workers`; exchanges pieces of at
/// most kMostBytes, each for at most `limit`, until no worker has another one.
std::vector<std::string> all_gather_text(const Worker& worker, const std::string& mine,
                                         const std::vector<std::string>& workers,
                                         Duration limit = kCreationTimeout,
                                         const WhileWaiting& while_waiting = {});

/// Calls `mine` and returns what it returned on all `workers`, in their order, if it threw on none of them. Otherwise throws
/// an Error of `kind` on all, with the message of the first worker on which it threw. Collective over `workers`.
std::vector<std::string> all_or_none(const Worker& worker, const std::vector<std::string>& workers,
                                     ErrorKind kind, const std::function<std::string()>& mine,
                                     const WhileWaiting& while_waiting = {});

}  // namespace torchspan::pipeline
