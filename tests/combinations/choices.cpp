#include "tests/combinations/choices.h"

#include <cstdlib>
#include <fmt/format.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <iostream>
#include <optional>
#include <random>
#include <sstream>

#include "tests/support/environment.h"

namespace torchspan::combinations {
namespace {

std::uint64_t mixed(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = 1469598103934665603u ^ (seed * 0x9E3779B97F4A7C15u);
  for (const char letter : name) hash = (hash ^ static_cast<unsigned char>(letter)) * 1099511628211u;
  return hash;
}

struct Outcome {
  bool tried = false;
  std::string failure;  ///< empty: none
};

Outcome outcome_of(const std::function<bool(Choices&)>& check, Choices& choices) {
  Outcome outcome;
  ::testing::TestPartResultArray results;
  {
    const ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &results);
    try {
      outcome.tried = check(choices);
    } catch (const std::exception& error) {
      outcome.failure = fmt::format("threw: {}\n", error.what());
    }
  }
  for (int i = 0; i < results.size(); ++i) {
    const auto& result = results.GetTestPartResult(i);
    if (result.failed() && outcome.failure.size() < 3000)
      outcome.failure += fmt::format("{}:{}: {}\n", result.file_name() ? result.file_name() : "",
                                     result.line_number(), result.message());
  }
  return outcome;
}

/// Sets choices to 0 while the case still fails.
std::pair<Choices, std::string> shrunk(const std::function<bool(Choices&)>& check, const Choices& failing,
                                       const std::string& failure) {
  std::pair<Choices, std::string> best{failing, failure};
  for (bool progress = true; progress;) {
    progress = false;
    for (const std::string& name : best.first.complex()) {
      Choices simpler = best.first.simplified({name});
      const Outcome outcome = outcome_of(check, simpler);
      if (outcome.failure.empty()) continue;
      best = {simpler, outcome.failure};
      progress = true;
    }
  }
  return best;
}

/// The cases that the environment asks for, or `cases` of them.
struct Range {
  explicit Range(long cases)
      : last(text != nullptr ? first : first + testing::number_from("TORCHSPAN_CASES", cases) - 1) {}
  Choices choices(long seed) const {
    return text != nullptr ? Choices(std::string(text)) : Choices(static_cast<std::uint64_t>(seed));
  }
  const char* text = std::getenv("TORCHSPAN_CHOICES");
  long first = testing::number_from("TORCHSPAN_SEED", 1L), last;
};

}  // namespace

Choices::Choices(const std::string& text) : random_(false) {
  std::istringstream in(text);
  for (std::string word; in >> word;) {
    const auto at = word.find('=');
    if (at != std::string::npos) fixed_[word.substr(0, at)] = std::atoi(word.c_str() + at + 1);
  }
}

int Choices::pick(const std::string& name, int count, int percent) {
  const auto known = fixed_.find(name);
  int value = 0;
  if (known != fixed_.end()) {
    value = std::min(known->second, count - 1);
  } else if (random_ && count > 1) {
    std::mt19937_64 random(mixed(seed_, name));
    if (static_cast<int>(random() % 100) < percent)
      value = 1 + static_cast<int>(random() % static_cast<unsigned>(count - 1));
  }
  return used_[name] = value;
}

std::string Choices::text() const {
  std::string text;
  for (const auto& [name, value] : used_) {
    if (value != 0) text += fmt::format("{}{}={}", text.empty() ? "" : " ", name, value);
  }
  return text;
}

std::vector<std::string> Choices::complex() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : used_) {
    if (value != 0) names.push_back(name);
  }
  return names;
}

Choices Choices::simplified(const std::vector<std::string>& names) const {
  Choices made = *this;
  made.used_.clear();
  for (const std::string& name : names) made.fixed_[name] = 0;
  return made;
}

void run_cases(long cases, const std::function<bool(Choices& choices)>& check) {
  const Range range(cases);
  long tried = 0;
  for (long seed = range.first; seed <= range.last; ++seed) {
    Choices choices = range.choices(seed);
    const Outcome outcome = outcome_of(check, choices);
    tried += outcome.tried ? 1 : 0;
    if (outcome.failure.empty()) continue;
    const auto [simple, failure] = shrunk(check, choices, outcome.failure);
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    FAIL() << "TORCHSPAN_SEED=" << seed << " TORCHSPAN_CASES=1, which chose " << choices.text()
           << ", fails; simpler:\nTORCHSPAN_CHOICES='" << simple.text()
           << "' combinations_test --gtest_filter=" << info->test_suite_name() << "." << info->name() << "\n"
           << failure << "\nThe first failure:\n"
           << outcome.failure;
  }
  std::cout << fmt::format("{} of {} cases, seeds {} to {}\n", tried, range.last - range.first + 1,
                           range.first, range.last);
}

void run_cases_together(long cases, const std::function<bool(Choices& choices, long seed)>& check) {
  const Range range(cases);
  long tried = 0;
  for (long seed = range.first; seed <= range.last; ++seed) {
    Choices choices = range.choices(seed);
    const Outcome outcome = outcome_of([&](Choices& chosen) { return check(chosen, seed); }, choices);
    tried += outcome.tried ? 1 : 0;
    if (outcome.failure.empty()) continue;
    throw std::runtime_error(
        fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1, TORCHSPAN_CHOICES='{}' fails:\n{}", seed,
                    choices.text(), outcome.failure));
  }
  std::cout << fmt::format("{} cases in this process\n", tried);
}

}  // namespace torchspan::combinations
