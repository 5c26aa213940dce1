#pragma once
#include <string>
#include <string_view>

namespace torchspan::launch {

/// Replaces the file at `path` by one that contains `text`: writes a temporary file beside it first, so that readers see
/// the old contents or the new ones. Writes through links, to pipes and to devices such as /dev/stdout in place, because
/// renaming would replace them. Returns why it could not be written; empty on success.
std::string write_whole_file(const std::string& path, std::string_view text);

}  // namespace torchspan::launch
