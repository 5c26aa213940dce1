#pragma once
#include <string>
#include <string_view>

namespace torchspan::launch {

/// Replaces the file at `path` by one that contains `text`: writes a temporary file beside it first, so that readers see
/// the old contents or the new ones. Writes through links, to pipes and to devices in place, because renaming would replace
/// them; a pipe without a reader is an error. If `path` names the file of standard output or standard error, as /dev/stderr
/// may, appends to that stream. Returns why it could not be written; empty on success.
std::string write_whole_file(const std::string& path, std::string_view text);

/// Whether `path` names the standard output of this process, as /dev/stdout does: other output would then mix with what
/// write_whole_file() writes.
bool is_standard_output(const std::string& path);

}  // namespace torchspan::launch
