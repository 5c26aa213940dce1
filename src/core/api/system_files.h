#pragma once
#include <filesystem>
#include <string>

namespace torchspan {

/// Returns the contents of a small file of the system, such as one in /proc; empty if it cannot be read.
std::string read_system_file(const std::filesystem::path& path);

/// Returns the first line of such a file.
std::string read_system_line(const std::filesystem::path& path);

/// Returns the id that the kernel gave to this host when it started.
std::string boot_id();

}  // namespace torchspan
