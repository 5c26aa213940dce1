#pragma once
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace torchspan::pipeline {

struct LocalPipeline;

/// Parameters of this worker whose gradients are exchanged with the other replicas in one message.
struct ReplicaBucket {
  std::vector<int>
      ranges;  ///< layer ranges that use them; when all their backwards have ended, gradients are complete
  bool tied = false;  ///< exchanged after the gradients of tied parameters were summed over stages
  int owner = 0;      ///< the replica that sums them
  std::vector<at::Tensor> parameters;
};

/// Buckets of all parameters of this worker, the same on the workers of all replicas that own the same stages. Each
/// replica owns about as many bytes. Empty if there is one replica.
std::vector<ReplicaBucket> make_replica_buckets(const LocalPipeline& local);

}  // namespace torchspan::pipeline
