#include <array>
#include <gtest/gtest.h>
#include <optional>

#include "data_parallel/toy_model.h"
#include "tests/support/environment.h"

/// Random programs of steps (accumulation, unused parameters, several forwards and backwards, zeroing or not)
/// against a simple model of gradients without buckets.
namespace torchspan::data_parallel::random_steps_test {
namespace {

using namespace testing;

/// One backward pass on one rank: which parameters its forwards use.
using Subset = std::vector<bool>;

enum class Forwards { kOne, kTwoThenTwoBackwards, kTwoThenOneBackward };

struct Pass {
  bool reduced = true;
  Forwards forwards = Forwards::kOne;
  std::vector<std::array<Subset, 2>> used = {};  ///< by rank, by forward
};

struct Iteration {
  int zeroing = 0;  ///< 0: to none, 1: in place, 2: not at all
  std::vector<Pass> passes = {};
};

struct Program {
  int size = 1;
  std::size_t parameters = 1;
  DataParallelOptions options;
  std::vector<Iteration> iterations;
};

Subset random_subset(std::mt19937& random, std::size_t count, bool all) {
  Subset subset(count);
  for (std::size_t p = 0; p < count; ++p) subset[p] = all || random() % 3 != 0;
  return subset;
}

Program random_program(unsigned seed) {
  std::mt19937 random(seed);
  Program program;
  program.size = 1 + static_cast<int>(random() % 4);
  program.parameters = 1 + random() % 6;
  DataParallelOptions& options = program.options;
  options.bucket_cap_mb = (1 + random() % 100) / 1048576.0;
  options.first_bucket_mb = (1 + random() % 100) / 1048576.0;
  options.gradient_as_bucket_view = random() % 2 == 0;
  const unsigned kind = random() % 3;
  options.find_unused_parameters = kind == 1;
  options.static_graph = kind == 2;
  std::vector<Subset> fixed;
  for (int rank = 0; rank < program.size; ++rank)
    fixed.push_back(random_subset(random, program.parameters, kind == 0));
  for (int i = 0; i < 6; ++i) {
    Iteration iteration{.zeroing = static_cast<int>(random() % 3)};
    const unsigned passes = 1 + random() % 3;
    for (unsigned nth = 0; nth < passes; ++nth) {
      Pass pass{.reduced = nth + 1 == passes, .forwards = static_cast<Forwards>(random() % 3)};
      for (int rank = 0; rank < program.size; ++rank) {
        const auto subset = [&] {
          return kind == 1 ? random_subset(random, program.parameters, false) : fixed[rank];
        };
        pass.used.push_back({subset(), subset()});
      }
      iteration.passes.push_back(std::move(pass));
    }
    program.iterations.push_back(std::move(iteration));
  }
  return program;
}

double factor(int rank, int iteration, std::size_t pass, std::size_t forward, std::size_t parameter) {
  return 1 + rank + 0.3 * iteration + 0.07 * static_cast<double>(pass) + 0.5 * static_cast<double>(forward) +
         0.01 * static_cast<double>(parameter);
}

/// Gradients are factors times cos(parameter), so the model stores only the factors.
class Oracle {
 public:
  explicit Oracle(const Program& program)
      : size_(program.size),
        sums_(program.size, std::vector<std::optional<double>>(program.parameters)),
        used_(program.parameters) {}

  void zero(int zeroing) {
    for (auto& rank : sums_) {
      for (auto& sum : rank) {
        if (zeroing == 0) sum.reset();
        if (zeroing == 1 && sum) sum = 0;
      }
    }
  }
  void backward(int rank, std::size_t parameter, double gradient) {
    auto& sum = sums_[rank][parameter];
    sum = sum.value_or(0) + gradient;
    used_[parameter] = true;
  }
  void reduce() {
    for (std::size_t p = 0; p < used_.size(); ++p) {
      if (!used_[p]) continue;
      double sum = 0;
      for (const auto& rank : sums_) sum += rank[p].value_or(0);
      for (auto& rank : sums_) rank[p] = sum / size_;
    }
    std::fill(used_.begin(), used_.end(), false);
  }
  std::optional<double> gradient(int rank, std::size_t parameter) const { return sums_[rank][parameter]; }

 private:
  const int size_;
  std::vector<std::vector<std::optional<double>>> sums_;
  std::vector<bool> used_;
};

/// Applies one pass of all ranks to the model.
void follow(Oracle& oracle, const Program& program, const Pass& pass, int iteration, std::size_t nth) {
  const std::size_t forwards = pass.forwards == Forwards::kOne ? 1 : 2;
  for (std::size_t forward = 0; forward < forwards; ++forward) {
    for (int rank = 0; rank < program.size; ++rank) {
      for (std::size_t p = 0; p < program.parameters; ++p) {
        if (pass.used[rank][forward][p]) oracle.backward(rank, p, factor(rank, iteration, nth, forward, p));
      }
    }
    const bool last = forward + 1 == forwards;
    if (pass.reduced && (last || pass.forwards == Forwards::kTwoThenTwoBackwards)) oracle.reduce();
  }
}

at::Tensor forward_of(Reducer& reducer, const Tensors& parameters, const at::Tensor& input, const Pass& pass,
                      const std::function<double(std::size_t)>& factors, const Subset& used) {
  at::Tensor loss = input.sum();  // gives a graph even if no parameter is used
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (used[p]) loss = loss + (parameters[p].sin() * factors(p)).sum();
  }
  return reducer.prepare_for_backward({loss}, {.synchronize = pass.reduced}).at(0);
}

void run(Reducer& reducer, const Tensors& parameters, const Pass& pass, const Rank& self,
         std::pair<int, std::size_t> place) {
  const at::Tensor input = leaf({2}, at::kDouble);
  const auto forward = [&](std::size_t nth) {
    const auto factors = [&, nth](std::size_t p) {
      return factor(self.rank, place.first, place.second, nth, p);
    };
    return forward_of(reducer, parameters, input, pass, factors, pass.used[self.rank][nth]);
  };
  const at::Tensor one = forward(0);
  if (pass.forwards == Forwards::kOne) return one.backward();
  const at::Tensor two = forward(1);
  if (pass.forwards == Forwards::kTwoThenOneBackward) return (one + two).backward();
  one.backward();
  two.backward();
}

void compare(const Oracle& oracle, const Tensors& parameters, int rank) {
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const auto wanted = oracle.gradient(rank, p);
    ASSERT_EQ(parameters[p].grad().defined(), wanted.has_value()) << "parameter " << p << ", rank " << rank;
    if (wanted) expect_close(parameters[p].grad(), parameters[p].detach().cos() * *wanted, 1e-12);
  }
}

TEST(RandomSteps, EqualTheGradientsOfThePlainModel) {
  const auto cases = torchspan::testing::number_from("TORCHSPAN_CASES", 40u);
  for (unsigned seed = 0; seed < cases; ++seed) {
    SCOPED_TRACE(seed);
    const Program program = random_program(seed);
    on_ranks(
        program.size,
        [&](const Rank& self) {
          Tensors parameters;
          for (std::size_t p = 0; p < program.parameters; ++p)
            parameters.push_back(leaf({static_cast<std::int64_t>(1 + p)}, at::kDouble));
          Reducer reducer(named(parameters), self.group, program.options);
          Oracle oracle(program);
          for (int i = 0; i < static_cast<int>(program.iterations.size()); ++i) {
            const Iteration& iteration = program.iterations[i];
            if (iteration.zeroing < 2) zero(parameters, iteration.zeroing == 0);
            oracle.zero(iteration.zeroing);
            for (std::size_t nth = 0; nth < iteration.passes.size(); ++nth) {
              SCOPED_TRACE(::testing::Message() << "iteration " << i << ", pass " << nth);
              follow(oracle, program, iteration.passes[nth], i, nth);
              run(reducer, parameters, iteration.passes[nth], self, {i, nth});
              compare(oracle, parameters, self.rank);
            }
          }
        },
        seed);
  }
}

}  // namespace
}  // namespace torchspan::data_parallel::random_steps_test
