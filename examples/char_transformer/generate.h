#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <torchspan/pipeline.h>
#include <torchspan/session.h>

#include "char_transformer/gpt_options.h"
#include "char_transformer/text.h"

namespace char_transformer {

struct GenerateOptions {
  std::int64_t characters = 300;
  std::int64_t context = 64;
  std::uint64_t seed = 1;
  std::int64_t texts = 1;  ///< written at the same time, as rows of a batch
  bool cache = true;       ///< keep keys and values; false: compute the context again for each character
};

/// Continues `prompt` with the model of a pipeline, character by character. Collective; returns the texts on all workers.
std::vector<std::string> generate(torchspan::Session& session, torchspan::Pipeline& pipe, const Text& text,
                                  const std::string& prompt, const GenerateOptions& options);

/// Writes the texts that the options ask for, prints the first one and the speed on rank 0. Collective.
void write_texts(torchspan::Session& session, torchspan::Pipeline& pipe, const Text& text,
                 const GptOptions& options);

}  // namespace char_transformer
