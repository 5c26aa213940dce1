#pragma once
#include "device/api/torch_version.h"
