#pragma once
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>

namespace torchspan::launch {

/// For tests: what a browser makes of a page: its elements after the script ran, and its console's messages.
struct Browsed {
  std::string page, console;
};

inline Browsed browse(const std::string& page) {
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_pageXXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  std::ofstream(folder + "/run.html") << page;
  const std::string command = "HOME=" + folder +
                              " timeout 60 chromium --headless --no-sandbox --disable-gpu --dump-dom "
                              "--enable-logging=stderr --user-data-dir=" +
                              folder +
                              "/profile --window-size=1280,2000 "
                              "file://" +
                              folder + "/run.html >" + folder + "/page 2>" + folder + "/console";
  Browsed result;
  EXPECT_EQ(std::system(command.c_str()), 0);
  const auto read = [&](const char* file) {
    std::ifstream stream(folder + file);
    return std::string{std::istreambuf_iterator<char>(stream), {}};
  };
  result = {read("/page"), read("/console")};
  std::filesystem::remove_all(folder);
  return result;
}

inline bool has_browser() { return std::system("command -v chromium >/dev/null") == 0; }

}  // namespace torchspan::launch
