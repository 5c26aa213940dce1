#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collective/world_link.h"

namespace torchspan::collective {

struct SerialOptions {
  std::vector<int> ranks = {};          ///< ranks of the world, by rank of the group
  std::vector<std::string> peers = {};  ///< names for messages
  int rank = 0;
  Duration timeout = std::chrono::minutes(5);
  /// Compares the ranks' calls before each operation, which costs one small gather. Other engines hang, or
  /// end the process, if ranks disagree.
  bool compare_calls = true;
  std::shared_ptr<WorldLink> world = {};  ///< may be null; a death that it reports breaks the group at once
  std::vector<std::uint64_t> instances = {};  ///< of the ranks' processes, if there is a world
};

}  // namespace torchspan::collective
