#include "pipeline/runtime/agreement.h"

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

/// A text begins with '+', or with '-' if it is the message of a failure.
std::vector<std::string> all_or_none(const Worker& worker, const std::vector<std::string>& workers,
                                     ErrorKind kind, const std::function<std::string()>& mine) {
  std::string text;
  try {
    text = '+' + mine();
  } catch (const Error& error) {
    text = '-' + std::string(error.message());
  } catch (...) {
    text = '-' + describe(std::current_exception()).text;
  }
  std::vector<std::string> all = all_gather_text(worker, text, workers);
  for (std::size_t i = 0; i < workers.size(); ++i) {
    if (all[i].starts_with('-')) throw Error(kind, all[i].substr(1)).with_worker(workers[i]);
    all[i].erase(0, 1);
  }
  return all;
}

std::optional<std::size_t> first_difference(const std::vector<std::string>& texts) {
  const auto found = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts.front(); });
  return found == texts.end() ? std::nullopt : std::optional(static_cast<std::size_t>(found - texts.begin()));
}

}  // namespace torchspan::pipeline
