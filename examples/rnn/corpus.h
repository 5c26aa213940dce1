#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace rnn {

/// A text in `rows` parts of equal length, side by side, read in windows of `context` characters: the windows of a row
/// follow each other, so that a recurrent network can keep its state from one to the next.
class Windows {
 public:
  /// `numbers`: int64, one per character; at least rows * context + 1 of them.
  Windows(const at::Tensor& numbers, std::int64_t rows, std::int64_t context);

  std::int64_t count() const { return count_; }
  std::int64_t rows() const { return characters_.size(0); }
  struct Window {
    at::Tensor characters;  ///< int64 [rows, context]
    at::Tensor next;        ///< of each of them, the character that follows it
  };
  Window at(std::int64_t index) const;

 private:
  at::Tensor characters_, next_;  ///< int64 [rows, count * context]
  std::int64_t context_, count_;
};

/// A text whose last tenth is held out, with losses that need no network.
class Corpus {
 public:
  /// Reads a UTF-8 file. Throws torchspan::Error{kInvalid}, with a remedy, for a missing file and for a text that is too
  /// short for `rows` and `context`.
  Corpus(const std::string& file, std::int64_t rows, std::int64_t context);

  std::int64_t vocabulary() const { return vocabulary_; }
  const Windows& training() const { return training_; }
  const Windows& held_out() const { return held_out_; }
  /// The loss on the held-out text of a guess by the frequency of each character in the rest.
  double frequency_loss() const;
  /// The same by the frequency of each pair of characters, each counted once more than it occurs.
  double pair_loss() const;

 private:
  struct Parts {
    at::Tensor training, held_out;
    std::int64_t vocabulary;
  };
  static Parts read(const std::string& file, std::int64_t rows, std::int64_t context);
  Corpus(const Parts& parts, std::int64_t rows, std::int64_t context);

  std::int64_t vocabulary_;
  Windows training_, held_out_;
  at::Tensor training_text_, held_out_text_;
};

}  // namespace rnn
