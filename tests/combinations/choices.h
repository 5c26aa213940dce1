#pragma once
// Random cases whose choices have names: the seed and a choice's name determine its value, so a choice may change alone.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace torchspan::combinations {

/// The choices of one case, numbers from 0, the simplest value.
class Choices {
 public:
  explicit Choices(std::uint64_t seed) : seed_(seed) {}
  /// "name=2 other=1"; those that are not listed are 0.
  explicit Choices(const std::string& text);

  /// One of `count` values; `percent`: how often another one than 0.
  int pick(const std::string& name, int count, int percent = 40);
  bool chance(const std::string& name, int percent = 40) { return pick(name, 2, percent) == 1; }

  /// The choices that were asked for and are not 0, as text from which the same case is made.
  std::string text() const;
  /// Their names.
  std::vector<std::string> complex() const;
  /// The same with all `names` at 0.
  Choices simplified(const std::vector<std::string>& names) const;

 private:
  std::uint64_t seed_ = 0;
  bool random_ = true;
  std::map<std::string, int> fixed_, used_;
};

/// A combination that is not tried, because it is known to fail.
template <class Case>
struct Exclusion {
  const char* reason;
  bool (*applies)(const Case& one);
};

/// As run_cases() below, for processes that run the same cases together: throws the first failure as it is.
void run_cases_together(long cases, const std::function<bool(Choices& choices, long seed)>& check);

/// Runs `check` with choices of seeds from TORCHSPAN_SEED (1) on, TORCHSPAN_CASES of them (`cases`), or with those of
/// TORCHSPAN_CHOICES. The first case in which it fails an expectation or throws fails the test: with as many choices at
/// their simplest value as possible, and the line that repeats it. `check` returns whether it tried the case.
void run_cases(long cases, const std::function<bool(Choices& choices)>& check);

}  // namespace torchspan::combinations
