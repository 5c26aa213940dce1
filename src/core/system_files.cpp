#include "core/api/system_files.h"

#include <fstream>
#include <sstream>
#include <utility>

namespace torchspan {

std::string read_system_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();  // unlike an iterator, does not throw if the process of the file ends meanwhile
  return std::move(text).str();
}

std::string read_system_line(const std::filesystem::path& path) {
  const std::string text = read_system_file(path);
  return text.substr(0, text.find('\n'));
}

std::string boot_id() { return read_system_line("/proc/sys/kernel/random/boot_id"); }

}  // namespace torchspan
