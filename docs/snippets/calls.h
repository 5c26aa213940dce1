#pragma once
#include "docs/snippets/modules.h"

extern ts::FunctionTable functions;
extern ts::WorkerOptions options;
extern at::Tensor input;
extern std::size_t waiting;

at::Tensor part_of(ts::Worker& worker, const at::Tensor& input);
inline constexpr ts::Function<part_of> kPartOf{"part_of"};
