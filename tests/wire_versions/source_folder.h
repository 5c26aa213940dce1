#pragma once
#include <string>

namespace torchspan::wire_versions {

/// The root of the sources from which this program is built.
std::string source_folder();

}  // namespace torchspan::wire_versions
