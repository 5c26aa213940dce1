#include "char_transformer/text.h"

#include <algorithm>
#include <fmt/format.h>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <set>

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <torchspan/core/error.h>

namespace char_transformer {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw torchspan::Error(torchspan::ErrorKind::kInvalid, text);
}

/// Returns the characters of UTF-8; nullopt if `utf8` is malformed.
std::optional<std::u32string> characters_of(const std::string& utf8) {
  std::u32string characters;
  for (std::size_t i = 0; i < utf8.size();) {
    const auto first = static_cast<unsigned char>(utf8[i]);
    const std::size_t length = first < 0x80    ? 1
                               : first >= 0xF0 ? 4
                               : first >= 0xE0 ? 3
                               : first >= 0xC0 ? 2
                                               : 0;
    if (length == 0 || i + length > utf8.size()) return std::nullopt;
    char32_t character = length == 1 ? first : first & (0x7Fu >> length);
    for (std::size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(utf8[i + k]);
      if ((next & 0xC0) != 0x80) return std::nullopt;
      character = character << 6 | (next & 0x3Fu);
    }
    characters.push_back(character);
    i += length;
  }
  return characters;
}

void append_utf8(char32_t character, std::string& text) {
  const auto byte = [&](char32_t bits) { text.push_back(static_cast<char>(bits)); };
  if (character < 0x80) return byte(character);
  if (character < 0x800) {
    byte(0xC0 | character >> 6);
  } else if (character < 0x10000) {
    byte(0xE0 | character >> 12);
    byte(0x80 | (character >> 6 & 0x3F));
  } else {
    byte(0xF0 | character >> 18);
    byte(0x80 | (character >> 12 & 0x3F));
    byte(0x80 | (character >> 6 & 0x3F));
  }
  byte(0x80 | (character & 0x3F));
}

}  // namespace

Text Text::load(const std::string& file, std::int64_t context) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream)
    refuse(fmt::format(
        "cannot read {}: fetch it with tools/fetch-data and run in the root of the repository, or "
        "name a text by --text",
        file));
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  const auto characters = characters_of(bytes);
  if (!characters) refuse(fmt::format("{} is not UTF-8", file));
  const auto least = static_cast<std::size_t>(20 * (context + 1));
  if (characters->size() < least) {
    refuse(fmt::format("{} has {} characters; windows of {} need at least {}: lower --context", file,
                       characters->size(), context, least));
  }
  return from(*characters);
}

Text Text::from(const std::u32string& characters) {
  Text text;
  const std::set<char32_t> different(characters.begin(), characters.end());
  text.alphabet_.assign(different.begin(), different.end());
  text.numbers_ = at::empty({static_cast<std::int64_t>(characters.size())}, at::kLong);
  auto* number = text.numbers_.data_ptr<std::int64_t>();
  for (const char32_t character : characters) {
    *number++ =
        std::lower_bound(text.alphabet_.begin(), text.alphabet_.end(), character) - text.alphabet_.begin();
  }
  return text;
}

std::vector<std::int64_t> Text::encode(const std::string& utf8) const {
  const auto characters = characters_of(utf8);
  if (!characters) refuse("the prompt is not UTF-8");
  std::vector<std::int64_t> numbers;
  for (const char32_t character : *characters) {
    const auto found = std::lower_bound(alphabet_.begin(), alphabet_.end(), character);
    if (found == alphabet_.end() || *found != character) {
      std::string shown;
      append_utf8(character, shown);
      refuse(fmt::format("'{}' of the prompt does not occur in the text", shown));
    }
    numbers.push_back(found - alphabet_.begin());
  }
  return numbers;
}

std::string Text::decode(const std::vector<std::int64_t>& numbers) const {
  std::string text;
  for (const std::int64_t number : numbers) append_utf8(alphabet_.at(static_cast<std::size_t>(number)), text);
  return text;
}

Text::Windows Text::windows(std::int64_t rows, std::int64_t context, std::uint64_t seed,
                            bool held_out) const {
  const std::int64_t border = size() - size() / 10;
  const std::int64_t first = held_out ? border : 0, last = (held_out ? size() : border) - context - 1;
  std::mt19937_64 random(seed);
  std::vector<at::Tensor> characters, next;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t begin =
        first + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(last - first));
    characters.push_back(numbers_.narrow(0, begin, context));
    next.push_back(numbers_.narrow(0, begin + 1, context));
  }
  return {at::stack(characters), at::stack(next)};
}

}  // namespace char_transformer
