#pragma once
#include <string>
#include <utility>

#include <torchspan/rpc/worker.h>

#include "elastic/rule/generation.h"

namespace torchspan::elastic {

/// A trainer's calls to rank 0.
class GenerationClient {
 public:
  /// Throws Error{kInvalid} if the worker has no ElasticExtension.
  GenerationClient(const Worker& worker, std::string trainer);

  /// Waits for the next generation. Throws kDisconnected if rank 0 dies, and what rank 0 refuses with.
  Generation next(const Report& report);
  /// Tells rank 0 that this rank takes no part any more; does not wait.
  void withdraw(const std::string& why);
  /// On rank 0: whether a rank waits to join. False on others.
  bool is_awaited() const;
  /// Whether a member other than this rank has ended, as far as this rank knows.
  bool has_ended(const Generation& generation) const;

 private:
  const Worker worker_;
  const std::string trainer_;
};

}  // namespace torchspan::elastic
