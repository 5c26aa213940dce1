#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace char_transformer {

/// A text as numbers, one a character, and the characters they stand for.
class Text {
 public:
  /// Reads a UTF-8 file. Throws torchspan::Error{kInvalid} that says what to do when it is missing, not
  /// UTF-8, or too short to train on windows of `context` characters.
  static Text load(const std::string& file, std::int64_t context);
  /// From characters themselves, for tests.
  static Text from(const std::u32string& characters);

  std::int64_t vocabulary() const { return static_cast<std::int64_t>(alphabet_.size()); }
  std::int64_t size() const { return numbers_.numel(); }
  /// The numbers of characters that all occur in the text.
  std::vector<std::int64_t> encode(const std::string& utf8) const;
  std::string decode(const std::vector<std::int64_t>& numbers) const;

  /// `rows` windows [rows, context] at places drawn from the seed, and what follows each of their characters.
  /// The last tenth of the text is for `held_out` windows only.
  struct Windows {
    at::Tensor characters;
    at::Tensor next;
  };
  Windows windows(std::int64_t rows, std::int64_t context, std::uint64_t seed, bool held_out) const;

 private:
  std::vector<char32_t> alphabet_;  ///< sorted
  at::Tensor numbers_;              ///< int64
};

}  // namespace char_transformer
