#pragma once
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iterator>
#include <string>
#include <string_view>

namespace torchspan::launch {

/// For tests: what a browser makes of a page: its elements after the scripts ran, and its console's messages.
struct Browsed {
  std::string page, console;
};

enum class ColorScheme : std::uint8_t { kLight, kDark };

inline Browsed browse(const std::string& page, ColorScheme scheme = ColorScheme::kLight) {
  std::string name = (std::filesystem::temp_directory_path() / "torchspan_pageXXXXXX").string();
  const std::string folder = mkdtemp(name.data());
  std::ofstream(folder + "/run.html") << page;
  const std::string command =
      "HOME=" + folder +
      " timeout 60 chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --dump-dom "
      "--enable-logging=stderr --blink-settings=preferredColorScheme=" +
      (scheme == ColorScheme::kDark ? "0" : "1") + " --user-data-dir=" + folder +
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

/// Adds a script to a page, after the page's own. The script's `probe(value)` writes a value as JSON to the page; read it
/// with probed().
inline std::string with_script(std::string page, const std::string& script) {
  constexpr std::string_view kNonce = "<script nonce=\"";
  const auto begin = page.find(kNonce) + kNonce.size();
  const std::string nonce = page.substr(begin, page.find('"', begin) - begin);
  const std::string probe =
      "const probe = (value) => { const box = document.createElement('pre'); box.id = 'probe'; "
      "box.textContent = JSON.stringify(value); document.body.append(box); };\n";
  page.insert(page.rfind("</body>"), "<script nonce=\"" + nonce + "\">" + probe + script + "</script>");
  return page;
}

/// Returns the text that a script's probe() wrote; empty if it did not.
inline std::string probed(const Browsed& shown) {
  constexpr std::string_view kBox = "<pre id=\"probe\">";
  const auto begin = shown.page.find(kBox);
  if (begin == std::string::npos) return "";
  return shown.page.substr(begin + kBox.size(), shown.page.find("</pre>", begin) - begin - kBox.size());
}

inline bool has_browser() { return std::system("command -v chromium >/dev/null") == 0; }

}  // namespace torchspan::launch
