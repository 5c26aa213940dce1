#pragma once
// Options of benchmarks that run over a slow link: --delay MS (one way), --rate MBIT and --loss PERCENT.
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "tests/support/slow_network.h"

namespace torchspan::bench {

inline constexpr const char* kSlowLinkOptions = "--delay MS, --rate MBIT, --loss PERCENT";

inline double positive_number(const std::string& option, const char* text) {
  std::size_t used = 0;
  double number = -1;
  try {
    number = std::stod(text, &used);
  } catch (const std::exception&) {  // the number stays negative
  }
  if (number < 0 || text[used] != '\0')
    throw std::invalid_argument(option + " needs a number of at least 0, not '" + text + "'");
  return number;
}

/// Adds an option with its value to `link`. Returns false for other options. Throws std::invalid_argument if the value is
/// no number.
inline bool read_link_option(const std::string& option, const char* value,
                             std::optional<testing::LinkQuality>& link) {
  constexpr double kNanoseconds = 1e6, kBits = 1e6, kShare = 0.01;
  if (option != "--delay" && option != "--rate" && option != "--loss") return false;
  const double number = positive_number(option, value);
  if (!link) link.emplace();
  if (option == "--delay") link->delay = Duration(static_cast<Duration::rep>(number * kNanoseconds));
  if (option == "--rate") link->bits_per_second = number * kBits;
  if (option == "--loss") link->loss = number * kShare;
  return true;
}

}  // namespace torchspan::bench
