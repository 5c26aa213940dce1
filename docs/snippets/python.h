#pragma once
#include "docs/snippets/modules.h"
