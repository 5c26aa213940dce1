#include "recommender/ratings.h"

#include <charconv>
#include <cmath>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <torchspan/core/error.h>

namespace recommender {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw torchspan::Error(torchspan::ErrorKind::kInvalid, text);
}

/// Numbers names in the order of their first occurrence.
class Numbers {
 public:
  std::int64_t of(const std::string& name) {
    return numbers_.try_emplace(name, static_cast<std::int64_t>(numbers_.size())).first->second;
  }
  std::int64_t count() const { return static_cast<std::int64_t>(numbers_.size()); }

 private:
  std::map<std::string, std::int64_t> numbers_;
};

struct Column {
  std::string name;
  Numbers categories;
  std::vector<std::int64_t> cells;
  at::Tensor tensor() const { return at::tensor(cells, at::kLong); }
};

std::vector<std::string> cells_of(std::string line) {
  if (!line.empty() && line.back() == '\r') line.pop_back();
  std::vector<std::string> cells(1);
  for (const char letter : line) {
    if (letter == ',') {
      cells.emplace_back();
    } else if (letter != '"') {
      cells.back().push_back(letter);
    }
  }
  return cells;
}

float number_in(const std::string& cell, const std::string& place) {
  float number = 0;
  const auto [end, error] = std::from_chars(cell.data(), cell.data() + cell.size(), number);
  if (error != std::errc() || end != cell.data() + cell.size() || !std::isfinite(number)) {
    refuse(fmt::format("{}: the rating is '{}'; give a number", place, cell));
  }
  return number;
}

/// Reads the lines below the header into the columns; column `y` as numbers.
std::vector<float> read_rows(std::ifstream& lines, const std::string& file, std::vector<Column>& columns) {
  std::vector<float> values;
  std::int64_t number = 1;
  for (std::string line; std::getline(lines, line);) {
    const std::string place = fmt::format("{}, line {}", file, ++number);
    const auto cells = cells_of(line);
    if (cells.size() != columns.size()) {
      refuse(fmt::format("{}: {} cells under {} names", place, cells.size(), columns.size()));
    }
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (columns[i].name == "y") {
        values.push_back(number_in(cells[i], place));
      } else {
        columns[i].cells.push_back(columns[i].categories.of(cells[i]));
      }
    }
  }
  return values;
}

const Column& find(const std::vector<Column>& columns, const std::string& name, const std::string& file) {
  for (const Column& column : columns) {
    if (column.name == name) return column;
  }
  refuse(
      fmt::format("{} has no column '{}'; the first line names columns s (student), d (lecturer), y "
                  "(rating) and the circumstances",
                  file, name));
}

}  // namespace

Ratings Ratings::at(const at::Tensor& positions) const {
  Ratings some = *this;
  for (at::Tensor* column :
       {&some.students, &some.lecturers, &some.profiles, &some.circumstances, &some.values})
    *column = column->index_select(0, positions);
  return some;
}

Ratings load(const std::string& file) {
  std::ifstream lines(file);
  std::string header;
  if (!std::getline(lines, header)) {
    refuse(fmt::format(
        "cannot read {}: run tools/fetch-data insteval.csv and the program in the root of the repository, or "
        "name the file with --data",
        file));
  }
  std::vector<Column> columns;
  for (const std::string& name : cells_of(header)) columns.push_back({name, {}, {}});
  find(columns, "y", file);
  const auto& students = find(columns, "s", file);
  const auto& lecturers = find(columns, "d", file);
  const std::vector<float> values = read_rows(lines, file, columns);
  constexpr std::size_t kLeast = 20;
  if (values.size() < kLeast) {
    refuse(fmt::format("{} has {} ratings; it takes {} to train and to test", file, values.size(), kLeast));
  }
  std::vector<at::Tensor> circumstances;
  for (const Column& column : columns) {
    if (column.name == "y" || column.name == "s" || column.name == "d") continue;
    circumstances.push_back(at::one_hot(column.tensor(), column.categories.count()).to(at::kFloat));
  }
  const auto rows = static_cast<std::int64_t>(values.size());
  if (circumstances.empty()) circumstances.push_back(at::ones({rows, 1}));
  Ratings ratings{.students = students.tensor(),
                  .lecturers = lecturers.tensor(),
                  .profiles = {},
                  .circumstances = at::cat(circumstances, 1),
                  .values = at::tensor(values),
                  .student_count = students.categories.count(),
                  .lecturer_count = lecturers.categories.count(),
                  .profile_count = 0};
  const auto [different, profiles, counts] = at::unique_dim(ratings.circumstances, 0, true, true);
  ratings.profiles = profiles;
  ratings.profile_count = different.size(0);
  return ratings;
}

Split split(const Ratings& ratings, std::uint64_t seed) {
  constexpr std::int64_t kHeldOut = 10;
  const at::Tensor order =
      at::randperm(ratings.size(), at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong));
  const at::Tensor held_out = order.remainder(kHeldOut).eq(0);
  return {ratings.at(held_out.logical_not().nonzero().squeeze(1)), ratings.at(held_out.nonzero().squeeze(1))};
}

std::vector<at::Tensor> shuffled_batches(std::int64_t count, std::int64_t batch, std::uint64_t seed) {
  return at::randperm(count, at::detail::createCPUGenerator(seed), at::TensorOptions(at::kLong)).split(batch);
}

at::Tensor occurrences(const at::Tensor& things, std::int64_t count) {
  return at::bincount(things, {}, count).to(at::kFloat);
}

double root_mean_square(const at::Tensor& errors) {
  return errors.to(at::kDouble).pow(2).mean().sqrt().item<double>();
}

double bias_only_error(const Split& data, double student_prior, double lecturer_prior) {
  constexpr int kSweeps = 30;
  const Ratings& train = data.train;
  const at::Tensor mean = train.values.mean();
  struct Bias {
    const at::Tensor& who;
    std::int64_t count;
    double prior;
    at::Tensor value;
  };
  std::vector<Bias> biases = {
      {train.students, train.student_count, student_prior, at::zeros({train.student_count})},
      {train.lecturers, train.lecturer_count, lecturer_prior, at::zeros({train.lecturer_count})}};
  at::Tensor rest = train.values - mean;
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    for (Bias& bias : biases) {
      rest = rest + bias.value.index_select(0, bias.who);
      const at::Tensor sums = at::zeros({bias.count}).index_add(0, bias.who, rest);
      bias.value = sums / (occurrences(bias.who, bias.count) + bias.prior);
      rest = rest - bias.value.index_select(0, bias.who);
    }
  }
  const Ratings& test = data.held_out;
  return root_mean_square(test.values - mean - biases[0].value.index_select(0, test.students) -
                          biases[1].value.index_select(0, test.lecturers));
}

}  // namespace recommender
