#pragma once
#include <torch/types.h>

#include <torchspan/session.h>

namespace ts = torchspan;

extern ts::Session& session;
