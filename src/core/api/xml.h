#pragma once
#include <string>
#include <string_view>

namespace torchspan {

/// `text` as the content of an XML or HTML element, not of an attribute. Drops control characters, which XML cannot
/// contain.
std::string escape_xml(std::string_view text);

}  // namespace torchspan
