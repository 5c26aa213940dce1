#pragma once
#include <string>

#include <torchspan/detail/core/executor.h>

#include "core/api/descriptor.h"

namespace torchspan::launch {

/// A running job of this host, whose folder changes with each restart. For one thread at a time.
class RunningJob {
 public:
  /// `folder`: that of the attempt that runs now; may be relative to the current folder.
  RunningJob(Executor& executor, const std::string& folder);

  /// An absolute path.
  const std::string& folder() const { return folder_; }
  /// Finds the folder of the attempt that runs now; between two attempts, folder() stays as it is. Returns false if the
  /// launcher has ended or is unknown.
  bool follow();

 private:
  bool has_ended() const;

  Executor& executor_;
  std::string folder_;
  const std::string launcher_;  ///< process id; empty: unknown
  Descriptor process_;          ///< readable when it has ended
};

}  // namespace torchspan::launch
