#pragma once
#include <memory>

namespace torchspan::pipeline {

/// What the layers of a pipeline keep between calls of Pipeline::infer(input, cache), such as the keys and values of
/// attention when a model generates text token by token. Every worker has one and passes it to the same calls; it holds
/// this worker's part only. Belongs to the pipeline of its first call, whose rows all later calls have. If a call
/// fails, the cache is as before it. May outlive its pipeline; frees what it holds when it is destroyed.
class Cache {
 public:
  Cache();
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  class State;
  State& state() { return *state_; }

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace torchspan::pipeline
