#pragma once
#include <ATen/ATen.h>

#include <torchspan/torchspan.h>

namespace ts = torchspan;

extern ts::Session& session;
extern const ts::Group& group;
