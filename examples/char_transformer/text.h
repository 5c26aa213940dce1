#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

namespace char_transformer {

/// A text as numbers, one per character, with its alphabet.
class Text {
 public:
  /// Reads a UTF-8 file. Throws torchspan::Error{kInvalid}, with a remedy, if it is missing, not UTF-8, or
  /// too short for windows of `context` characters.
  static Text load(const std::string& file, std::int64_t context);
  /// Makes a text from characters, for tests.
  static Text from(const std::u32string& characters);

  std::int64_t vocabulary() const { return static_cast<std::int64_t>(alphabet_.size()); }
  std::int64_t size() const { return numbers_.numel(); }
  /// Returns the numbers of the characters, all of which must occur in the text.
  std::vector<std::int64_t> encode(const std::string& utf8) const;
  std::string decode(const std::vector<std::int64_t>& numbers) const;

  /// `rows` windows [rows, context] at positions drawn from the seed, and the next character of each of their
  /// characters. Only `held_out` windows use the last tenth of the text.
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
