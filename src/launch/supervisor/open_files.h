#pragma once
#include <cstdint>
#include <sys/resource.h>

namespace torchspan::launch {

/// Raises this process's limit of open files as far as it may, because the launcher has up to six for each worker. The
/// destructor restores it. Leaves the limit as it is if the system refuses.
class RaisedOpenFiles {
 public:
  RaisedOpenFiles();
  ~RaisedOpenFiles();
  RaisedOpenFiles(const RaisedOpenFiles&) = delete;

  /// The soft limit before it was raised; 0 if it was not raised.
  std::uint64_t before() const { return raised_ ? std::uint64_t{before_.rlim_cur} : 0; }

 private:
  rlimit before_{};
  bool raised_ = false;
};

}  // namespace torchspan::launch
