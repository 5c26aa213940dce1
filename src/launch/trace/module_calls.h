#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/api/trace_format.h"

namespace torchspan::launch {

/// One forward of a module.
struct ModuleCall {
  std::string module;
  std::optional<std::size_t> parent;  ///< index of the call of the enclosing module
  std::uint32_t thread = 0;
  std::int32_t forward_thread = 0;  ///< LibTorch's number of it
  std::int64_t begin = 0, end = 0;
  std::uint64_t first_node = 0, last_node = 0;  ///< sequence numbers of the autograd nodes: from, to before
  std::uint32_t first_use = 0;                  ///< name of the module whose parameter was used first,
  std::int32_t first_parameter = -1;            ///< and number of the parameter
};

/// Groups the uses of parameters, in order of time for each thread, to calls of the modules that enclose them.
class ModuleCalls {
 public:
  /// `path` is the module's name, such as "encoder.layers.0".
  void add_use(const StoredSpan& use, const std::string& path);
  /// Later uses on this thread belong to new calls.
  void end_forward(std::uint32_t thread) { open_[thread].clear(); }

  /// In the order in which they began on their thread; a module precedes those inside it.
  const std::vector<ModuleCall>& calls() const { return calls_; }
  /// Returns the innermost call that created an autograd node; nullopt if no call did.
  std::optional<std::size_t> find(std::int32_t forward_thread, std::uint64_t node) const;

 private:
  std::vector<ModuleCall> calls_;
  std::map<std::uint32_t, std::vector<std::size_t>> open_;  ///< by thread: calls, outermost first
  std::map<std::int32_t, std::vector<std::size_t>>
      by_forward_;  ///< by LibTorch's thread: calls by first node
};

}  // namespace torchspan::launch
