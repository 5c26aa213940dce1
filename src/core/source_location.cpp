#include <algorithm>

#include <torchspan/detail/core/source_location.h>

namespace torchspan {

std::string_view file_of(std::string_view path) {
  path.remove_prefix(std::min(path.size(), path.rfind('/') + 1));
  return path;
}

std::string site_text(const SourceLocation& site) {
  if (site.line() == 0) return {};
  return std::string(file_of(site.file_name())) + ":" + std::to_string(site.line());
}

}  // namespace torchspan
