#include "pipeline/runtime/ties.h"

#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include "pipeline/runtime/all_gather_text.h"
#include "pipeline/runtime/value_of_first.h"

namespace torchspan::pipeline {
namespace {

using TiedParameters = std::vector<TiedParameter>;

/// Limit of each exchange.
constexpr Duration kTieTimeout = std::chrono::minutes(5);

[[noreturn]] void refuse_tie(const LocalPipeline& local, const std::string& why) {
  throw Error(ErrorKind::kInvalid,
              fmt::format("Layers::tie() in pipeline '{}': {}", local.options.name, why));
}

std::string name_of(const LocalPipeline& local, const TiedParameter& parameter) {
  return fmt::format("'{}' of layer {} ('{}')", parameter.name, parameter.layer,
                     local.plan.layers[static_cast<std::size_t>(parameter.layer)]);
}

int worker_of(const LocalPipeline& local, const TiedParameter& parameter) {
  const Location& location = local.plan.locations[static_cast<std::size_t>(parameter.layer)];
  return local.plan.worker_of_stage[static_cast<std::size_t>(location.stage)];
}

/// Throws for ties that are wrong whatever the layers have; the same on all workers.
void check_ties(const LocalPipeline& local, const std::vector<TiedParameters>& ties) {
  std::set<std::pair<int, std::string>> seen;
  for (const TiedParameters& tie : ties) {
    if (tie.size() < 2) refuse_tie(local, "a tie needs two parameters or more");
    for (const TiedParameter& parameter : tie) {
      if (seen.emplace(parameter.layer, parameter.name).second) continue;
      refuse_tie(local,
                 fmt::format("parameter {} is tied twice; list all parameters that are equal in one tie",
                             name_of(local, parameter)));
    }
  }
}

at::Tensor find_parameter(const LocalPipeline& local, const TiedParameter& parameter) {
  const auto& module = local.layers[static_cast<std::size_t>(parameter.layer)].module;
  const std::string what = name_of(local, parameter);
  if (!module) refuse_tie(local, fmt::format("the layer of parameter {} has no parameters", what));
  const auto all = module->named_parameters();
  if (const at::Tensor* found = all.find(parameter.name)) return *found;
  refuse_tie(local,
             fmt::format("parameter {} does not exist; the layer has {}", what, fmt::join(all.keys(), ", ")));
}

/// A line that must be the same for all copies.
std::string form_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}], {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                     tensor.requires_grad() ? "requires gradients" : "frozen");
}

/// Lists the form of each tied parameter of this worker: "tie member form" by line; or '-' and an error.
std::string describe_own(const LocalPipeline& local, const std::vector<TiedParameters>& ties) {
  std::string text = "+";
  try {
    for (std::size_t tie = 0; tie < ties.size(); ++tie) {
      for (std::size_t member = 0; member < ties[tie].size(); ++member) {
        if (worker_of(local, ties[tie][member]) != local.me) continue;
        text += fmt::format("{} {} {}\n", tie, member, form_of(find_parameter(local, ties[tie][member])));
      }
    }
  } catch (const Error& error) {
    return '-' + std::string(error.message());
  }
  return text;
}

/// Throws unless the parameters of each tie have one form.
void compare_forms(const LocalPipeline& local, const std::vector<TiedParameters>& ties) {
  std::map<std::pair<std::size_t, std::size_t>, std::string> forms;  // by tie and member
  const std::vector<std::string> all =
      all_gather_text(local.worker, describe_own(local, ties), local.plan.workers, kTieTimeout);
  for (std::size_t worker = 0; worker < all.size(); ++worker) {
    const std::string& text = all[worker];
    if (text.front() == '-')
      throw Error(ErrorKind::kInvalid, text.substr(1)).with_worker(local.plan.workers[worker]);
    for (std::size_t begin = 1; begin < text.size();) {
      const std::size_t end = text.find('\n', begin);
      std::size_t used = 0;
      const std::string line = text.substr(begin, end - begin);
      const std::size_t tie = std::stoull(line, &used);
      const std::size_t space = line.find(' ', used + 1);
      forms[{tie, std::stoull(line.substr(used))}] = line.substr(space + 1);
      begin = end + 1;
    }
  }
  for (const auto& [place, form] : forms) {
    const auto& [tie, member] = place;
    const std::string& first = forms.at({tie, 0});
    if (form == first) continue;
    refuse_tie(local,
               fmt::format("parameter {} is {}, parameter {} is {}; tied parameters must match",
                           name_of(local, ties[tie][0]), first, name_of(local, ties[tie][member]), form));
  }
}

/// Sets the copies of this worker to the values of the first copy.
void copy_values(const LocalPipeline& local, const Tie& tie) {
  const torch::autograd::AutoGradMode no_grad(false);
  std::vector<std::string> names;
  for (const int worker : tie.workers) names.push_back(local.plan.workers[static_cast<std::size_t>(worker)]);
  const at::Tensor first = value_of_first(local.worker, names, tie.copies.front(), tie.name);
  for (const at::Tensor& copy : tie.copies) copy.copy_(first);
}

}  // namespace

std::string to_text(const std::vector<TiedParameters>& ties) {
  std::string text;
  for (const TiedParameters& tie : ties) {
    text += "tie";
    for (const TiedParameter& parameter : tie) text += fmt::format(" {}.{}", parameter.layer, parameter.name);
    text += '\n';
  }
  return text;
}

std::vector<Tie> make_ties(const LocalPipeline& local, const Layers& layers) {
  const std::vector<TiedParameters>& declared = layers.ties();
  if (declared.empty()) return {};
  check_ties(local, declared);
  compare_forms(local, declared);
  std::vector<Tie> ties;
  for (const TiedParameters& parameters : declared) {
    Tie tie{name_of(local, parameters.front()), {}, {}};
    for (const TiedParameter& parameter : parameters) {
      const int worker = worker_of(local, parameter);
      if (std::find(tie.workers.begin(), tie.workers.end(), worker) == tie.workers.end())
        tie.workers.push_back(worker);
      if (worker != local.me) continue;
      const at::Tensor copy = find_parameter(local, parameter);
      const bool known = std::any_of(tie.copies.begin(), tie.copies.end(),
                                     [&](const at::Tensor& other) { return other.is_same(copy); });
      if (!known) tie.copies.push_back(copy);
    }
    if (!tie.copies.empty()) copy_values(local, tie);
    ties.push_back(std::move(tie));
  }
  return ties;
}

}  // namespace torchspan::pipeline
