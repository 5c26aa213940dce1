#include "char_transformer/generate.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <optional>

#include <torch/types.h>
#include <torch/utils.h>

#include <torchspan/core/observation.h>

namespace char_transformer {
namespace {

namespace ts = torchspan;

/// The worker with the scores draws the next character of each text and sends them to the others. Returns [texts, 1].
at::Tensor draw_next(ts::Session& session, const ts::pipeline::Batch& output, std::int64_t texts) {
  ts::Bytes mine;
  if (output.size() > 0) {
    const at::Tensor scores = output.tensor().select(1, -1).to(torch::kCPU);
    const at::Tensor drawn = torch::multinomial((scores / 0.8).softmax(-1), 1).contiguous();
    const auto* bytes = static_cast<const std::byte*>(drawn.data_ptr());
    mine = ts::Bytes(bytes, bytes + drawn.nbytes());
  }
  const at::Tensor drawn = torch::empty({texts, 1}, torch::kLong);
  for (const ts::Bytes& bytes : session.worker().all_gather_bytes(mine)) {
    if (!bytes.empty()) std::memcpy(drawn.data_ptr(), bytes.data(), std::min(bytes.size(), drawn.nbytes()));
  }
  return drawn;
}

}  // namespace

std::vector<std::string> generate(ts::Session& session, ts::Pipeline& pipe, const Text& text,
                                  const std::string& prompt, const GenerateOptions& options) {
  pipe.eval();
  torch::manual_seed(options.seed);
  at::Tensor written =
      torch::tensor(text.encode(prompt), torch::kLong).unsqueeze(0).repeat({options.texts, 1});
  const auto last = [&](std::int64_t count) { return written.narrow(1, written.size(1) - count, count); };
  std::optional<ts::pipeline::Cache> cache;
  std::int64_t cached = 0;  // characters that the cache has seen
  for (std::int64_t i = 0; i < options.characters; ++i) {
    const std::int64_t length = written.size(1);
    ts::pipeline::Batch output;
    if (options.cache) {
      std::int64_t fresh = 1;
      if (!cache ||
          cached + 1 > options.context) {  // no position is left: begin again with the last characters
        fresh = std::min(length, cache ? std::max<std::int64_t>(options.context / 2, 1) : options.context);
        cached = 0;
        cache.emplace();
      }
      cached += fresh;
      output = pipe.infer(last(fresh), *cache);
    } else {
      output = pipe.infer(last(std::min(length, options.context)));
    }
    written = torch::cat({written, draw_next(session, output, options.texts)}, 1);
  }
  std::vector<std::string> texts;
  for (std::int64_t row = 0; row < options.texts; ++row) {
    const auto* numbers = written[row].data_ptr<std::int64_t>();
    texts.push_back(text.decode(std::vector<std::int64_t>(numbers, numbers + written.size(1))));
  }
  return texts;
}

void write_texts(ts::Session& session, ts::Pipeline& pipe, const Text& text, const GptOptions& options) {
  const ts::Progress clock(session);
  const auto texts =
      generate(session, pipe, text, options.prompt,
               {options.sample, options.model.context, options.model.seed, options.texts, options.cache});
  if (session.rank() != 0) return;
  fmt::print("{} x {} characters: {:.0f} characters/s\n\n{}\n", options.texts, options.sample,
             static_cast<double>(options.texts * options.sample) / ts::to_seconds(clock.elapsed()),
             texts.front());
}

}  // namespace char_transformer
