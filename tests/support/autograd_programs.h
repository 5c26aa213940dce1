#pragma once
#include <algorithm>
#include <cstdlib>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/support/autograd_functions.h"
#include "tests/support/hook_calls.h"

/// Random programs over several workers, and the same programs in one process with LibTorch's engine, as the
/// oracle of distributed autograd. A program has inputs, instructions that each make values from earlier ones
/// on some worker, and losses that are differentiated one after the other.
namespace torchspan::testing {

struct Instruction {
  enum Kind : std::uint8_t {
    kAdd,
    kSlice,
    kMultiply,
    kSine,
    kMatrices,
    kLarger,
    kSplit,
    kHalves,
    kPair,
    kInPlace,
    kInPlaceViews,
    kMean,
    kMixed,
    kOnwards,
    kCallChain,
    kScale,
    kLookUp,
    kSingle,
    kByReference,
    kFetch,
    kTidy,  ///< the kinds from here on need not take part in a loss that uses all values
    kDetached = kTidy,
    kWithoutGrad,
    kSentWithoutGrad,
    kForgetful,
    kWasteful,
    kKinds
  } kind{};
  int worker = 0;
  int other = 0;
  int a = 0, b = 0;                   ///< values
  std::vector<std::int64_t> stops{};  ///< of a call chain
};

struct Program {
  int workers = 1;
  int inputs = 2;
  bool tidy = false;  ///< every message contributes to every loss, so that FAST is correct
  unsigned threads = 1;
  std::vector<Instruction> instructions;
  std::vector<std::vector<int>> losses;  ///< of each pass: values whose sums add up
  std::vector<bool> retain;
  bool many_roots = false;  ///< each value of a loss is a separate root
  bool hooked = false;      ///< values have hooks that scale their gradients, and retain them
  int bare_roots = 0;       ///< how many times a separate leaf is a root of each pass

  std::string text() const;
};

inline std::string Program::text() const {
  static constexpr const char* kNames[] = {
      "add",          "slice",   "multiply",   "sine",         "matrices",          "larger",
      "split",        "halves",  "pair",       "in_place",     "in_place_views",    "mean",
      "mixed",        "onwards", "call_chain", "scale",        "look_up",           "single",
      "by_reference", "fetch",   "detached",   "without_grad", "sent_without_grad", "forgetful",
      "wasteful"};
  static_assert(std::size(kNames) == Instruction::kKinds);
  std::string text = fmt::format("{} workers, {} inputs, {} threads, {} bare roots{}{}{}", workers, inputs,
                                 threads, bare_roots, tidy ? ", FAST" : "", many_roots ? ", a root each" : "",
                                 hooked ? ", hooked" : "");
  for (const Instruction& in : instructions) {
    text += fmt::format("\n  {} on {} ({}) of v{} v{}", kNames[in.kind], in.worker, in.other, in.a, in.b);
    for (const std::int64_t stop : in.stops) text += fmt::format(" >{}", stop);
  }
  for (std::size_t pass = 0; pass < losses.size(); ++pass) {
    text += "\n  loss";
    for (const int value : losses[pass]) text += fmt::format(" v{}", value);
    text += retain[pass] ? ", retained" : "";
  }
  return text;
}

/// Which instruction made a value: the graphs of values without a common maker share only leaves.
using Makers = std::set<int>;

inline int outputs_of(Instruction::Kind kind) {
  if (kind == Instruction::kSplit) return 3;
  return kind == Instruction::kPair ? 2 : 1;
}

inline Makers makers_of(const Instruction& in, int index, int output, const std::vector<Makers>& all) {
  const Makers& first = all[static_cast<std::size_t>(in.a)];
  const Makers& second = all[static_cast<std::size_t>(in.b)];
  const bool apart = in.kind == Instruction::kPair && in.a != in.b;
  Makers makers = apart && output == 1 ? second : first;
  if (!apart) makers.insert(second.begin(), second.end());
  const bool each = apart || in.kind == Instruction::kSplit;
  makers.insert(3 * index + (each ? output : 0));
  return makers;
}

/// Two losses whose graphs share only leaves; none if no such values are drawn.
template <class Pick>
std::vector<std::vector<int>> disjoint_losses(const std::vector<Makers>& makers, const Pick& pick) {
  std::vector<std::vector<int>> losses(2);
  std::vector<Makers> taken(2);
  for (int attempt = 0; attempt < 8; ++attempt) {
    const int value = pick(static_cast<int>(makers.size()));
    const auto side = static_cast<std::size_t>(pick(2));
    const Makers& mine = makers[static_cast<std::size_t>(value)];
    const Makers& others = taken[1 - side];
    if (std::any_of(mine.begin(), mine.end(), [&](int maker) { return others.contains(maker); })) continue;
    losses[side].push_back(value);
    taken[side].insert(mine.begin(), mine.end());
  }
  if (losses[0].empty() || losses[1].empty()) losses.clear();
  return losses;
}

inline Program make_program(std::uint64_t seed, int most_workers = 6) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<std::uint64_t>(below)); };
  Program program;
  program.workers = 1 + pick(most_workers);
  program.inputs = 1 + pick(3);
  program.tidy = pick(4) == 0;
  program.threads = pick(4) == 0 ? 3 : 1;
  program.many_roots = pick(3) == 0;
  program.hooked = pick(2) == 0;
  program.bare_roots = std::max(0, pick(4) - 1);
  const int length = 1 + pick(10);
  int values = program.inputs;
  std::vector<Makers> makers(static_cast<std::size_t>(values));
  for (int i = 0; i < length; ++i) {
    Instruction in;
    in.kind = static_cast<Instruction::Kind>(pick(program.tidy ? Instruction::kTidy : Instruction::kKinds));
    in.worker = pick(program.workers);
    in.other = pick(program.workers);
    in.a = pick(values);
    in.b = pick(values);
    if (in.kind == Instruction::kCallChain) {
      for (int stop = 0; stop <= pick(4); ++stop) in.stops.push_back(pick(program.workers));
    }
    program.instructions.push_back(in);
    const int outputs = outputs_of(in.kind);
    for (int output = 0; output < outputs; ++output) makers.push_back(makers_of(in, i, output, makers));
    values += outputs;
  }
  if (!program.tidy && pick(3) == 0) {
    program.losses = disjoint_losses(makers, pick);
    program.retain.assign(program.losses.size(), false);
    if (!program.losses.empty()) return program;
  }
  const int passes = 1 + pick(3);
  for (int pass = 0; pass < passes; ++pass) {
    std::vector<int> loss;
    if (program.tidy) {
      for (int value = 0; value < values; ++value) loss.push_back(value);
    } else if (pass > 0 && pick(3) == 0) {
      loss = program.losses.back();
    } else {
      for (int i = 0; i <= pick(3); ++i) loss.push_back(pick(values));
    }
    program.losses.push_back(loss);
    program.retain.push_back(pass + 1 < passes);
  }
  return program;
}

/// Computes an instruction by the name of its function, where `Calls` decides. Mostly one value.
template <class Calls>
std::vector<at::Tensor> run_one(const Instruction& in, const at::Tensor& a, const at::Tensor& b,
                                Calls& calls) {
  switch (in.kind) {
    case Instruction::kAdd:
      return {a + b.tanh()};
    case Instruction::kSlice:
      return {a.narrow(1, 0, 2).repeat({1, 2})};
    case Instruction::kSplit:
      return calls.many(in.worker, kSplit, a);
    case Instruction::kPair:
      return calls.many(in.worker, kPair, a, b);
    case Instruction::kHalves: {
      const auto parts = calls.many(in.worker, kHalves, a);
      return {at::cat({parts[1], parts[0]}, 1)};
    }
    case Instruction::kMixed: {
      const auto parts = calls.many(in.worker, kMixed, a);
      return {calls.one(in.other, kUnite, parts[0], parts[1], parts[2])};
    }
    case Instruction::kMultiply:
      return {calls.one(in.worker, kMultiply, a, b)};
    case Instruction::kSine:
      return {calls.one(in.worker, kSine, a)};
    case Instruction::kMatrices:
      return {calls.one(in.worker, kMatrices, a, b)};
    case Instruction::kLarger:
      return {calls.one(in.worker, kLarger, a, b)};
    case Instruction::kInPlace:
      return {calls.one(in.worker, kInPlace, a)};
    case Instruction::kInPlaceViews:
      return {calls.one(in.worker, kInPlaceViews, a, b)};
    case Instruction::kMean:
      return {calls.one(in.worker, kMeanOf, std::vector<at::Tensor>{a, b, a})};
    case Instruction::kDetached:
      return {calls.one(in.worker, kDetached, a)};
    case Instruction::kWithoutGrad:
      return {calls.one(in.worker, kWithoutGrad, a)};
    case Instruction::kSentWithoutGrad: {
      const at::NoGradGuard guard;
      return {calls.one(in.worker, kMultiply, a, b)};
    }
    case Instruction::kForgetful:
      return {calls.one(in.worker, kForgetful, a, b)};
    default:
      return {calls.special(in, a, b)};
  }
}

/// All values of a program.
template <class Calls>
std::vector<at::Tensor> run(const Program& program, std::vector<at::Tensor> values, Calls& calls,
                            HooksCalls& hooks) {
  for (const Instruction& in : program.instructions) {
    const at::Tensor a = values[static_cast<std::size_t>(in.a)], b = values[static_cast<std::size_t>(in.b)];
    const std::vector<at::Tensor> made = run_one(in, a, b, calls);
    if (program.hooked) add_hooks(made, hooks);
    values.insert(values.end(), made.begin(), made.end());
  }
  return values;
}

/// Runs everything in this process.
struct LocalCalls {
  explicit LocalCalls(int workers) {
    for (int worker = 0; worker < workers; ++worker) stores.emplace_back(worker + 1);
  }
  template <auto kFunction, class... Args>
  std::vector<at::Tensor> many(int, Function<kFunction>, const Args&... args) {
    return kFunction(args...);
  }
  template <auto kFunction, class... Args>
  at::Tensor one(int, Function<kFunction>, const Args&... args) {
    return kFunction(args...);
  }
  at::Tensor special(const Instruction& in, const at::Tensor& a, const at::Tensor& b) {
    const Store& store = stores[static_cast<std::size_t>(in.worker)];
    switch (in.kind) {
      case Instruction::kOnwards:
        return testing::multiply(a.tanh(), b) + a;
      case Instruction::kCallChain:
        return toured(in.stops.size(), a);
      case Instruction::kScale:
        return store.scale(a);
      case Instruction::kLookUp:
        // Times 1: otherwise LibTorch's engine adds in place to a sparse gradient whose values are also the
        // gradient of `a`.
        return a + store.rows() * 1;
      case Instruction::kSingle:
        return store.single(a);
      case Instruction::kByReference:
        return store.scale(a).tanh();
      case Instruction::kFetch:
        return a.sin() * b;
      case Instruction::kWasteful:
        return testing::split(a)[1] * 2;
      default:
        throw std::logic_error("no such instruction");
    }
  }
  static at::Tensor toured(std::size_t stops, const at::Tensor& a) {
    return stops == 0 ? a.cos() : toured(stops - 1, a.sin()) * a;
  }
  std::vector<Store> stores;
};

/// Runs each instruction on the worker that the program names.
struct RemoteCalls {
  RemoteCalls(Worker& given, int workers) : worker(given) {
    for (int rank = 0; rank < workers; ++rank) stores.push_back(worker.remote(rank, kStore, rank + 1));
  }
  template <auto kFunction, class... Args>
  std::vector<at::Tensor> many(int to, Function<kFunction> token, const Args&... args) {
    return worker.rpc_sync(to, token, args...);
  }
  template <auto kFunction, class... Args>
  at::Tensor one(int to, Function<kFunction> token, const Args&... args) {
    return worker.rpc_sync(to, token, args...);
  }
  at::Tensor special(const Instruction& in, const at::Tensor& a, const at::Tensor& b) {
    const RRef<Store>& store = stores[static_cast<std::size_t>(in.worker)];
    switch (in.kind) {
      case Instruction::kOnwards:
        return worker.rpc_sync(in.worker, kOnwards, in.other, a, b);
      case Instruction::kCallChain:
        return worker.rpc_sync(in.worker, kCallChain, in.stops, a);
      case Instruction::kScale:
        return store.rpc_sync(kScale, a);
      case Instruction::kLookUp:
        return store.rpc_sync(kLookUp, a);
      case Instruction::kSingle:
        return store.rpc_sync(kSingle, a);
      case Instruction::kByReference:
        return worker.rpc_sync(in.other, kByReference, store, a);
      case Instruction::kFetch:
        return worker.rpc_sync(in.other, kFetch, worker.remote(in.worker, kSine, a), b);
      case Instruction::kWasteful:
        return worker.rpc_sync(in.worker, kWasteful, in.other, a);
      default:
        throw std::logic_error("no such instruction");
    }
  }
  Worker& worker;
  std::vector<RRef<Store>> stores;
};

/// The roots of a pass; empty if none of them has a graph. `bare` is a leaf.
inline std::vector<at::Tensor> roots_of(const Program& program, const std::vector<at::Tensor>& values,
                                        const std::vector<int>& chosen, const at::Tensor& bare) {
  std::vector<at::Tensor> roots;
  for (const int value : chosen) {
    const at::Tensor root = values[static_cast<std::size_t>(value)].pow(2).sum();
    if (!root.requires_grad()) continue;
    if (program.many_roots || roots.empty()) {
      roots.push_back(root);
    } else {
      roots[0] = roots[0] + root;
    }
  }
  for (int i = 0; i < program.bare_roots; ++i) roots.insert(roots.begin() + roots.size() / 2, bare);
  return roots;
}

inline at::Tensor bare_leaf() { return at::ones({}, at::kDouble).set_requires_grad(true); }

inline std::vector<at::Tensor> inputs_of(const Program& program) {
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < program.inputs; ++i) {
    inputs.push_back(numbers({kRows, kWidth}, 50 + static_cast<std::uint64_t>(i)).set_requires_grad(true));
  }
  return inputs;
}

/// Gradients by name; an undefined one must not exist. Also the number of parameters with a gradient, by
/// worker, including those without a name here.
struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  std::vector<std::int64_t> keys;
  std::vector<std::pair<int, int>> hooks;  ///< calls of each value's hooks, and those without a gradient

  void note_values(const std::vector<at::Tensor>& values, const HooksCalls& calls) {
    if (calls.empty()) return;
    for (std::size_t i = values.size() - calls.size(); i < values.size(); ++i) {
      if (!values[i].is_leaf()) gradients[fmt::format("value{}", i)] = values[i].grad();
    }
    for (const auto& call : calls) hooks.emplace_back(call->all, call->undefined);
  }
  void note_inputs(const std::vector<at::Tensor>& of_inputs) {
    for (std::size_t i = 0; i < of_inputs.size(); ++i) gradients[fmt::format("input{}", i)] = of_inputs[i];
  }
  void note_store(int worker, const std::vector<at::Tensor>& of_parameters) {
    for (std::size_t i = 0; i < of_parameters.size(); ++i) {
      gradients[fmt::format("worker{}.{}", worker, Store::kNames[i])] = of_parameters[i];
    }
  }
};

inline std::int64_t count_defined(const std::vector<at::Tensor>& gradients) {
  return std::count_if(gradients.begin(), gradients.end(), [](const at::Tensor& x) { return x.defined(); });
}

inline Outcome run_locally(const Program& program) {
  Outcome outcome;
  LocalCalls calls(program.workers);
  const auto inputs = inputs_of(program);
  const at::Tensor bare = bare_leaf();
  HooksCalls hooks;
  const auto values = run(program, inputs, calls, hooks);
  for (std::size_t pass = 0; pass < program.losses.size(); ++pass) {
    const auto roots = roots_of(program, values, program.losses[pass], bare);
    if (!roots.empty()) torch::autograd::backward(roots, {}, program.retain[pass]);
  }
  outcome.note_values(values, hooks);
  outcome.gradients["bare"] = bare.grad();
  std::vector<at::Tensor> of_inputs;
  for (const at::Tensor& input : inputs) of_inputs.push_back(input.grad());
  outcome.note_inputs(of_inputs);
  for (int worker = 0; worker < program.workers; ++worker) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : calls.stores[static_cast<std::size_t>(worker)].parameters()) {
      gradients.push_back(parameter.grad());
    }
    outcome.note_store(worker, gradients);
    outcome.keys.push_back(count_defined(gradients));
  }
  outcome.keys[0] += count_defined(of_inputs) + (bare.grad().defined() ? 1 : 0);
  return outcome;
}

/// The same, run from `worker` over its world.
inline Outcome run_remotely(Worker& worker, const Program& program) {
  Outcome outcome;
  const auto inputs = inputs_of(program);
  autograd::Context context(worker);
  RemoteCalls calls(worker, program.workers);
  const at::Tensor bare = bare_leaf();
  HooksCalls hooks;
  const auto values = run(program, inputs, calls, hooks);
  for (std::size_t pass = 0; pass < program.losses.size(); ++pass) {
    const auto roots = roots_of(program, values, program.losses[pass], bare);
    if (roots.empty()) continue;
    context.backward(roots, {.retain_graph = program.retain[pass],
                             .mode = program.tidy ? autograd::PassMode::kFast : autograd::PassMode::kSmart,
                             .timeout = std::chrono::seconds(20),
                             .threads = program.threads});
  }
  std::vector<at::Tensor> of_inputs;
  for (const at::Tensor& input : inputs) of_inputs.push_back(context.gradient(input));
  outcome.note_inputs(of_inputs);
  outcome.note_values(values, hooks);
  outcome.gradients["bare"] = context.gradient(bare);
  for (int rank = 0; rank < program.workers; ++rank) {
    outcome.note_store(rank, calls.stores[static_cast<std::size_t>(rank)].rpc_sync(kGradientsOf));
    outcome.keys.push_back(worker.rpc_sync(rank, kKeysOf));
  }
  return outcome;
}

/// How two outcomes differ; empty if they do not. Counts the comparisons.
struct Comparison {
  int with_gradient = 0, without = 0;

  std::string operator()(const Outcome& ours, const Outcome& expected) {
    if (ours.gradients.size() != expected.gradients.size()) return "the outcomes have different parameters";
    for (const auto& [name, value] : expected.gradients) {
      const at::Tensor& mine = ours.gradients.at(name);
      if (mine.defined() != value.defined()) {
        return fmt::format("{} has {} gradient", name, mine.defined() ? "a" : "no");
      }
      ++(value.defined() ? with_gradient : without);
      if (!value.defined()) continue;
      if (mine.is_sparse() != value.is_sparse() || mine.scalar_type() != value.scalar_type()) {
        return name + " has a gradient of another kind";
      }
      const double limit = value.scalar_type() == at::kDouble ? 1e-11 : 1e-5;
      if (!at::allclose(mine.to_dense(), value.to_dense(), limit, limit)) {
        std::ostringstream text;
        text << name << " is " << mine.to_dense() << ", not " << value.to_dense();
        return text.str();
      }
    }
    for (std::size_t i = 0; i < expected.hooks.size(); ++i) {
      const auto [all, undefined] = ours.hooks.at(i);
      if (ours.hooks[i] != expected.hooks[i]) {
        return fmt::format("hook {} was called {} times, {} without a gradient, not {} and {}", i, all,
                           undefined, expected.hooks[i].first, expected.hooks[i].second);
      }
    }
    for (std::size_t worker = 0; worker < expected.keys.size(); ++worker) {
      const std::int64_t mine = ours.keys.at(worker), wanted = expected.keys[worker];
      if (mine != wanted) return fmt::format("worker{} has {} gradients, not {}", worker, mine, wanted);
    }
    return {};
  }
};

}  // namespace torchspan::testing
