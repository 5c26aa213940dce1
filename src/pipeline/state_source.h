#pragma once
#include <string>
#include <vector>

#include <torchspan/state/source.h>

namespace torchspan::pipeline {

class Pipeline;

/// How a pipeline lists its state for checkpoints. Holds a reference.
state::SourcePtr source_of(Pipeline& pipeline);
/// Names of pipeline.parameters(), in their order.
std::vector<std::string> names_of_parameters(const Pipeline& pipeline);

}  // namespace torchspan::pipeline
