#pragma once
#include <string>

#include <torchspan/pipeline.h>

namespace char_transformer {

/// Throws torchspan::Error{kInvalid} if the file of --draw cannot be written.
void check_drawing(const std::string& file);
/// Draws the last step as measured, below its plan if it has one.
void draw_last_step(const torchspan::Pipeline& pipe, const std::string& file);

}  // namespace char_transformer
