#include "rnn/corpus.h"

#include <fmt/format.h>
#include <fstream>
#include <iterator>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>

#include "char_transformer/text.h"

namespace rnn {
namespace {

/// Splits `numbers` into rows of whole windows; the last `offset` characters of none are used.
at::Tensor in_rows(const at::Tensor& numbers, std::int64_t rows, std::int64_t length, std::int64_t offset) {
  const std::int64_t all = (numbers.numel() - 1) / rows;
  return numbers.narrow(0, offset, rows * all).view({rows, all}).narrow(1, 0, length);
}

}  // namespace

Windows::Windows(const at::Tensor& numbers, std::int64_t rows, std::int64_t context)
    : context_(context), count_((numbers.numel() - 1) / rows / context) {
  characters_ = in_rows(numbers, rows, count_ * context, 0);
  next_ = in_rows(numbers, rows, count_ * context, 1);
}

Windows::Window Windows::at(std::int64_t index) const {
  return {characters_.narrow(1, index * context_, context_), next_.narrow(1, index * context_, context_)};
}

Corpus::Parts Corpus::read(const std::string& file, std::int64_t rows, std::int64_t context) {
  const auto text = char_transformer::Text::load(file, 1);
  std::ifstream stream(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  const at::Tensor numbers = at::tensor(text.encode(bytes), at::kLong);
  const std::int64_t held_out = numbers.numel() / 10;
  if (held_out <= rows * context) {
    throw torchspan::Error(
        torchspan::ErrorKind::kInvalid,
        fmt::format("{} has {} characters; {} rows of {} need more than {}: lower --rows or --context", file,
                    numbers.numel(), rows, context, 10 * rows * context));
  }
  return {numbers.narrow(0, 0, numbers.numel() - held_out),
          numbers.narrow(0, numbers.numel() - held_out, held_out), text.vocabulary()};
}

Corpus::Corpus(const std::string& file, std::int64_t rows, std::int64_t context)
    : Corpus(read(file, rows, context), rows, context) {}

Corpus::Corpus(const Parts& parts, std::int64_t rows, std::int64_t context)
    : vocabulary_(parts.vocabulary),
      training_(parts.training, rows, context),
      held_out_(parts.held_out, rows, context),
      training_text_(parts.training),
      held_out_text_(parts.held_out) {}

double Corpus::frequency_loss() const {
  const at::Tensor counts = at::bincount(training_text_, {}, vocabulary_).to(at::kDouble) + 1;
  return -(counts / counts.sum()).log().index_select(0, held_out_text_).mean().item<double>();
}

double Corpus::pair_loss() const {
  const auto pairs = [&](const at::Tensor& text) {
    return text.slice(0, 0, -1) * vocabulary_ + text.slice(0, 1);
  };
  const at::Tensor counts =
      at::bincount(pairs(training_text_), {}, vocabulary_ * vocabulary_).to(at::kDouble) + 1;
  const at::Tensor table = counts.view({vocabulary_, vocabulary_});
  const at::Tensor shares = (table / table.sum(1, true)).view({-1});
  return -shares.log().index_select(0, pairs(held_out_text_)).mean().item<double>();
}

}  // namespace rnn
