#include <algorithm>
#include <chrono>
#include <fmt/format.h>
#include <functional>
#include <map>
#include <tuple>

#include <torchspan/core/error.h>
#include <torchspan/schedule.h>

#include "core/api/throw_invalid.h"
#include "schedule/tables.h"

namespace torchspan::schedule {
namespace {

double peak(const Candidate& candidate) {
  const auto& peaks = candidate.timeline.peak_live;
  return *std::max_element(peaks.begin(), peaks.end());
}

/// Makes and simulates the candidates.
class Comparer {
 public:
  explicit Comparer(const CompareOptions& options) : options_(options) {}

  Comparison run() {
    add_schedules();
    add_searched();
    auto& candidates = result_.candidates;
    std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      const auto key = [](const Candidate& c) {
        return std::tuple(!c.fits, c.timeline.makespan, step_period(c.timeline), peak(c));
      };
      return key(a) < key(b);
    });
    return std::move(result_);
  }

 private:
  using Make = std::function<Table(const Shape&)>;

  Shape shape(int chunks) const { return {options_.ranks, options_.micro_batches, chunks}; }

  void add_schedules() {
    add(1, [](const Shape& shape) { return gpipe(looped(shape)); });
    add(1, [](const Shape& shape) { return one_forward_one_backward(shape); });
    add(1, zero_bubble_h1);
    add(1, zero_bubble_h2);
    // With one rank, its stages follow each other, and nothing is gained by a second one.
    if (options_.ranks == 1) return;
    add(2, interleaved);
    add(2, looped_breadth_first);
    add(2, interleaved_zero_bubble);
    add(2, zero_bubble_v);
    add(2, dual_pipe_v);
  }

  /// Searches for an order within the limit: on a line, around the ranks, and in a V.
  void add_searched() {
    const auto search = [this](const Placement& placement, int chunks) {
      const auto costs = divide_costs(options_.costs, placement.rank_of_stage);
      add_table(zero_bubble(placement, costs, options_.memory_limit), chunks);
    };
    search(looped(shape(1)), 1);
    if (options_.ranks == 1) return;
    search(looped(shape(2)), 2);
    search(v_shaped(shape(2)), 2);
    Candidate& last = result_.candidates.back();
    last.timeline.name = last.table.name += "-v";
  }

  /// Leaves out a schedule that is not defined for this number of micro-batches.
  void add(int chunks, const Make& make) {
    Table table;
    try {
      table = make(shape(chunks));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kInvalid) throw;
      result_.undefined.push_back(error.message());
      return;
    }
    add_table(std::move(table), chunks);
  }

  void add_table(Table table, int chunks) {
    Candidate candidate;
    candidate.table = std::move(table);
    candidate.stages_per_rank = chunks;
    candidate.timeline =
        simulate(candidate.table, divide_costs(options_.costs, candidate.table.rank_of_stage));
    candidate.fits = peak(candidate) <= options_.memory_limit * (1 + 1e-9);
    result_.candidates.push_back(std::move(candidate));
  }

  const CompareOptions& options_;
  Comparison result_;
};

}  // namespace

std::vector<Costs> divide_costs(const std::vector<Costs>& by_rank, const std::vector<int>& rank_of_stage) {
  std::map<int, int> stages;
  for (const int rank : rank_of_stage) ++stages[rank];
  const int ranks = stages.empty() ? 0 : stages.rbegin()->first + 1;
  if (by_rank.size() != 1 && by_rank.size() < static_cast<std::size_t>(ranks)) {
    throw_invalid(
        "divide_costs: by_rank has {} entries; expected one for all ranks, or one for each of the {}",
        by_rank.size(), ranks);
  }
  std::vector<Costs> costs;
  for (const int rank : rank_of_stage) {
    const int parts = stages.at(rank);
    Costs cost = by_rank.size() == 1 ? by_rank.front() : by_rank[static_cast<std::size_t>(rank)];
    cost.forward /= parts;
    cost.input_gradient /= parts;
    cost.weight_gradient /= parts;
    cost.activation /= parts;
    if (cost.weight_input) *cost.weight_input /= parts;
    cost.recomputation /= parts;
    costs.push_back(cost);
  }
  return costs;
}

Comparison compare(const CompareOptions& options) {
  check(Shape{options.ranks, options.micro_batches, 1}, "compare");
  check(options.costs, static_cast<std::size_t>(options.ranks), "compare");
  return Comparer(options).run();
}

namespace {

double in_milliseconds(Duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

}  // namespace

std::string costs_json(const std::vector<Costs>& costs, MemoryUnit unit) {
  std::string stages;
  for (const Costs& cost : costs) {
    stages += fmt::format(
        "{}\n  {{\"forward\": {}, \"input_gradient\": {}, \"weight_gradient\": {}, \"transfer\": {}, "
        "\"activation\": {}",
        stages.empty() ? "" : ",", in_milliseconds(cost.forward), in_milliseconds(cost.input_gradient),
        in_milliseconds(cost.weight_gradient), in_milliseconds(cost.transfer), cost.activation);
    if (cost.weight_input) stages += fmt::format(", \"weight_input\": {}", *cost.weight_input);
    if (cost.recomputation > 0) stages += fmt::format(", \"recomputation\": {}", cost.recomputation);
    stages += "}";
  }
  const std::string memory = unit == MemoryUnit::kBytes ? "\"memory\": \"bytes\", " : "";
  return "{" + memory + "\"stages\": [" + stages + "\n]}\n";
}

}  // namespace torchspan::schedule
