#include "launch/report/report_page.h"

#include <fmt/format.h>
#include <map>
#include <random>

#include "launch/version.h"

namespace torchspan::launch {
namespace {

/// 128 random bits: text in the trace cannot contain the nonce that lets a script run.
std::string random_nonce() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

}  // namespace

std::string make_report_page(std::string_view data) {
  const ReportAssets assets = report_assets();
  const std::string nonce = random_nonce();
  const std::string torchspan_version = version();
  const std::map<std::string_view, std::string_view> values = {{"NONCE", nonce},
                                                               {"STYLE", assets.style},
                                                               {"SCRIPT", assets.script},
                                                               {"DATA", data},
                                                               {"VERSION", torchspan_version}};
  // Values are not searched for further marks.
  std::string page;
  std::string_view rest = assets.page;
  while (!rest.empty()) {
    const auto mark = rest.find('@');
    page += rest.substr(0, mark);
    if (mark == std::string_view::npos) break;
    rest.remove_prefix(mark + 1);
    const auto end = rest.find('@');
    page += values.at(rest.substr(0, end));
    rest.remove_prefix(end + 1);
  }
  return page;
}

}  // namespace torchspan::launch
