#include "pipeline/runtime/all_gather_text.h"

#include <algorithm>
#include <string_view>

namespace torchspan::pipeline {

std::vector<std::string> all_gather_text(const Worker& worker, const std::string& mine,
                                         const std::vector<std::string>& workers, Duration limit) {
  std::vector<std::string> texts(workers.size());
  bool more = true;  // after a full piece, which may be the last one
  for (std::size_t begin = 0; more; begin += kMostBytes) {
    const auto piece = std::string_view(mine).substr(std::min(begin, mine.size()), kMostBytes);
    const auto* bytes = reinterpret_cast<const std::byte*>(piece.data());
    const std::vector<Bytes> all =
        worker.all_gather_bytes(Bytes(bytes, bytes + piece.size()), workers, limit);
    more = false;
    for (std::size_t i = 0; i < workers.size(); ++i) {
      texts[i].append(reinterpret_cast<const char*>(all[i].data()), all[i].size());
      more = more || all[i].size() == kMostBytes;
    }
  }
  return texts;
}

}  // namespace torchspan::pipeline
