#pragma once
#include <string>
#include <string_view>

namespace torchspan::launch {

/// The parts of the page, from src/launch/report/page.
struct ReportAssets {
  std::string_view page, style, script;
};
ReportAssets report_assets();

/// Returns one HTML page that shows `data` (of encode_report()) and loads nothing. Its policy lets run only its own
/// script and style.
std::string make_report_page(std::string_view data);

}  // namespace torchspan::launch
