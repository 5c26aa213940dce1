#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <torchspan/checkpoint.h>
#include <torchspan/collective.h>
#include <torchspan/rpc/worker.h>

namespace torchspan {

struct ElasticOptions;
struct DataPosition;
struct ElasticStep;

}  // namespace torchspan

namespace torchspan::elastic {

/// The replica that a Training trains: the wrapped module of the current group, and the program's functions.
/// Called on the thread of run().
struct Replica {
  std::function<void(const collective::Group&)> wrap;  ///< collective
  std::function<void()> unwrap;
  std::function<const collective::Group*()> group;  ///< of the wrapped module; null if there is none
  std::function<void(const ElasticStep&)> body;
  std::function<void(const ElasticStep&)> apply;
};

/// Type-independent part of ElasticTrainer.
class Training {
 public:
  using MakeGroup = std::function<collective::Group(collective::GroupOptions)>;

  Training(const Worker& worker, MakeGroup make_group, std::shared_ptr<torch::nn::Module> module,
           ElasticOptions options);
  ~Training();
  Training(const Training&) = delete;

  void add(std::string name, checkpoint::SourcePtr source);
  bool run(std::int64_t steps, Replica replica);
  const DataPosition& position() const;

 private:
  class Impl;
  ProcessOwned<Impl> impl_;
};

}  // namespace torchspan::elastic
