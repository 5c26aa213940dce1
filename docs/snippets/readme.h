#pragma once
#include <memory>

#include "docs/snippets/modules.h"

extern std::unique_ptr<std::vector<Batch>> loader;
