// Random programs over several workers, held against the same program in one process: values of gradients,
// and which parameters have one at all.
#include <cstdlib>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>

#include <torch/torch.h>

#include <torchspan/autograd/passes.h>

#include "tests/support/cluster.h"

namespace torchspan {
namespace {

using autograd::Context;
using autograd::Passes;
using autograd::PassMode;
using testing::ClusterOptions;
using testing::SimCluster;

constexpr std::int64_t kRows = 3, kWidth = 4;

at::Tensor numbers(at::IntArrayRef sizes, std::uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::kDouble);
}

/// Parameters that live on one worker: one is used by scale(), one by look_up() with sparse gradients, one by
/// nobody.
struct Store {
  explicit Store(std::int64_t seed) {
    const auto number = static_cast<std::uint64_t>(seed);
    scale_weight = numbers({kWidth}, number).set_requires_grad(true);
    table = numbers({kRows, kWidth}, number + 100).set_requires_grad(true);
    unused = numbers({kWidth}, number + 200).set_requires_grad(true);
  }
  at::Tensor scale(const at::Tensor& x) const { return x * scale_weight; }
  at::Tensor look_up(const at::Tensor& x) const {
    return x + at::embedding(table, at::arange(kRows, at::kLong).flip(0), -1, false, true);
  }
  at::Tensor scale_weight, table, unused;
};

at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor sine(const at::Tensor& a) { return a.sin(); }
std::vector<at::Tensor> split(const at::Tensor& a) {
  return {a * 2, a.view({kWidth, kRows}).t().contiguous(), a + 1};
}
at::Tensor detached(const at::Tensor& a) { return a.detach() * 3; }
at::Tensor in_place(const at::Tensor& a) {
  at::Tensor b = a + 0.5;
  b.mul_(2);
  return b;
}
/// One output needs gradients, one is an integer tensor, one is single precision.
std::vector<at::Tensor> mixed(const at::Tensor& a) {
  return {a.cos(), (a > 0).to(at::kLong), a.to(at::kFloat)};
}
at::Tensor unite(const at::Tensor& a, const at::Tensor& signs, const at::Tensor& single) {
  return a + signs.to(at::kDouble) + single.to(at::kDouble);
}
/// Goes on to the next worker, or back to where it came from.
at::Tensor onwards(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b);
/// Another worker uses a store by its reference.
at::Tensor by_reference(Worker& worker, const RRef<Store>& store, const at::Tensor& a);
/// Makes a call whose result nobody uses.
at::Tensor wasteful(Worker& worker, std::int64_t to, const at::Tensor& a);
std::vector<at::Tensor> gradients_of(Worker& worker, const RRef<Store>& store) {
  const Store& held = store.local_value();
  const auto context = autograd::current(worker);
  return {context.gradient(held.scale_weight), context.gradient(held.table), context.gradient(held.unused)};
}

constexpr Class<Store, std::int64_t> kStore{"Store"};
constexpr Function<&Store::scale> kScale{"Store.scale"};
constexpr Function<&Store::look_up> kLookUp{"Store.look_up"};
constexpr Function<multiply> kMultiply{"multiply"};
constexpr Function<sine> kSine{"sine"};
constexpr Function<split> kSplit{"split"};
constexpr Function<detached> kDetached{"detached"};
constexpr Function<in_place> kInPlace{"in_place"};
constexpr Function<mixed> kMixed{"mixed"};
constexpr Function<unite> kUnite{"unite"};
constexpr Function<onwards> kOnwards{"onwards"};
constexpr Function<by_reference> kByReference{"by_reference"};
constexpr Function<wasteful> kWasteful{"wasteful"};
constexpr Function<gradients_of> kGradientsOf{"gradients_of"};

at::Tensor onwards(Worker& worker, std::int64_t to, const at::Tensor& a, const at::Tensor& b) {
  return worker.rpc_sync(to, kMultiply, a.tanh(), b) + a;
}
at::Tensor by_reference(Worker&, const RRef<Store>& store, const at::Tensor& a) {
  return store.rpc_sync(kScale, a).tanh();
}
at::Tensor wasteful(Worker& worker, std::int64_t to, const at::Tensor& a) {
  worker.rpc_sync(to, kSine, a);
  return worker.rpc_sync(to, kSplit, a)[1] * 2;
}

struct Instruction {
  enum Kind {
    kAdd,
    kSlice,
    kMultiply,
    kSine,
    kSplit,
    kDetached,
    kInPlace,
    kMixed,
    kOnwards,
    kScale,
    kLookUp,
    kByReference,
    kWasteful,
    kKinds
  } kind{};
  int worker = 0;
  int other = 0;
  int a = 0, b = 0;  ///< values
};

struct Program {
  int workers = 1;
  int inputs = 2;
  std::vector<Instruction> instructions;
  std::vector<std::vector<int>> losses;  ///< of each pass: values whose sums add up
  std::vector<bool> retain;

  std::string text() const {
    static constexpr const char* kNames[] = {"add",      "slice",        "multiply", "sine",    "split",
                                             "detached", "in_place",     "mixed",    "onwards", "scale",
                                             "look_up",  "by_reference", "wasteful"};
    std::string text = fmt::format("{} workers, {} inputs", workers, inputs);
    for (std::size_t i = 0; i < instructions.size(); ++i) {
      const Instruction& in = instructions[i];
      text += fmt::format("\n  {} on {} ({}) of v{} v{}", kNames[in.kind], in.worker, in.other, in.a, in.b);
    }
    for (std::size_t pass = 0; pass < losses.size(); ++pass) {
      text += "\n  loss";
      for (const int value : losses[pass]) text += fmt::format(" v{}", value);
      text += retain[pass] ? ", retained" : "";
    }
    return text;
  }
};

Program make_program(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<std::uint64_t>(below)); };
  Program program;
  program.workers = 1 + pick(6);
  program.inputs = 1 + pick(3);
  const int length = 1 + pick(9);
  int values = program.inputs;
  for (int i = 0; i < length; ++i) {
    Instruction in;
    in.kind = static_cast<Instruction::Kind>(pick(Instruction::kKinds));
    in.worker = pick(program.workers);
    in.other = pick(program.workers);
    in.a = pick(values);
    in.b = pick(values);
    program.instructions.push_back(in);
    values += in.kind == Instruction::kSplit ? 3 : 1;
  }
  const int passes = 1 + pick(2);
  for (int pass = 0; pass < passes; ++pass) {
    std::vector<int> loss;
    for (int i = 0; i <= pick(3); ++i) loss.push_back(pick(values));
    program.losses.push_back(loss);
    program.retain.push_back(pass + 1 < passes);
  }
  return program;
}

/// Runs the instructions with the calls that `Calls` makes; returns all values.
template <class Calls>
std::vector<at::Tensor> run(const Program& program, std::vector<at::Tensor> values, Calls& calls) {
  for (const Instruction& in : program.instructions) {
    const at::Tensor a = values[static_cast<std::size_t>(in.a)], b = values[static_cast<std::size_t>(in.b)];
    switch (in.kind) {
      case Instruction::kAdd:
        values.push_back(a + b.tanh());
        break;
      case Instruction::kSlice:
        values.push_back(a.narrow(1, 0, 2).repeat({1, 2}));
        break;
      case Instruction::kSplit:
        for (const at::Tensor& part : calls.split(in, a)) values.push_back(part);
        break;
      case Instruction::kMixed: {
        const auto parts = calls.mixed(in, a);
        values.push_back(calls.unite(in, parts));
        break;
      }
      default:
        values.push_back(calls.one(in, a, b));
    }
  }
  return values;
}

struct LocalCalls {
  explicit LocalCalls(int workers) {
    for (int worker = 0; worker < workers; ++worker) stores.emplace_back(worker + 1);
  }
  std::vector<at::Tensor> split(const Instruction&, const at::Tensor& a) { return torchspan::split(a); }
  std::vector<at::Tensor> mixed(const Instruction&, const at::Tensor& a) { return torchspan::mixed(a); }
  at::Tensor unite(const Instruction&, const std::vector<at::Tensor>& p) {
    return torchspan::unite(p[0], p[1], p[2]);
  }
  at::Tensor one(const Instruction& in, const at::Tensor& a, const at::Tensor& b) {
    const Store& store = stores[static_cast<std::size_t>(in.worker)];
    switch (in.kind) {
      case Instruction::kMultiply:
        return torchspan::multiply(a, b);
      case Instruction::kSine:
        return sine(a);
      case Instruction::kDetached:
        return detached(a);
      case Instruction::kInPlace:
        return in_place(a);
      case Instruction::kOnwards:
        return torchspan::multiply(a.tanh(), b) + a;
      case Instruction::kScale:
        return store.scale(a);
      case Instruction::kLookUp:
        return store.look_up(a);
      case Instruction::kByReference:
        return store.scale(a).tanh();
      case Instruction::kWasteful:
        return torchspan::split(a)[1] * 2;
      default:
        throw std::logic_error("no such call");
    }
  }
  std::vector<Store> stores;
};

struct RemoteCalls {
  RemoteCalls(Worker& given, int workers) : worker(given) {
    for (int rank = 0; rank < workers; ++rank) stores.push_back(worker.remote(rank, kStore, rank + 1));
  }
  std::vector<at::Tensor> split(const Instruction& in, const at::Tensor& a) {
    return worker.rpc_sync(in.worker, kSplit, a);
  }
  std::vector<at::Tensor> mixed(const Instruction& in, const at::Tensor& a) {
    return worker.rpc_sync(in.worker, kMixed, a);
  }
  at::Tensor unite(const Instruction& in, const std::vector<at::Tensor>& p) {
    return worker.rpc_sync(in.other, kUnite, p[0], p[1], p[2]);
  }
  at::Tensor one(const Instruction& in, const at::Tensor& a, const at::Tensor& b) {
    const RRef<Store>& store = stores[static_cast<std::size_t>(in.worker)];
    switch (in.kind) {
      case Instruction::kMultiply:
        return worker.rpc_sync(in.worker, kMultiply, a, b);
      case Instruction::kSine:
        return worker.rpc_sync(in.worker, kSine, a);
      case Instruction::kDetached:
        return worker.rpc_sync(in.worker, kDetached, a);
      case Instruction::kInPlace:
        return worker.rpc_sync(in.worker, kInPlace, a);
      case Instruction::kOnwards:
        return worker.rpc_sync(in.worker, kOnwards, in.other, a, b);
      case Instruction::kScale:
        return store.rpc_sync(kScale, a);
      case Instruction::kLookUp:
        return store.rpc_sync(kLookUp, a);
      case Instruction::kByReference:
        return worker.rpc_sync(in.other, kByReference, store, a);
      case Instruction::kWasteful:
        return worker.rpc_sync(in.worker, kWasteful, in.other, a);
      default:
        throw std::logic_error("no such call");
    }
  }
  Worker& worker;
  std::vector<RRef<Store>> stores;
};

at::Tensor loss_of(const std::vector<at::Tensor>& values, const std::vector<int>& chosen) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const int value : chosen) loss = loss + values[static_cast<std::size_t>(value)].pow(2).sum();
  return loss;
}

std::vector<at::Tensor> inputs_of(const Program& program) {
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < program.inputs; ++i) {
    inputs.push_back(numbers({kRows, kWidth}, 50 + static_cast<std::uint64_t>(i)).set_requires_grad(true));
  }
  return inputs;
}

/// Gradients by name; and what the passes threw, which must be alike too ("a second time").
struct Outcome {
  std::map<std::string, at::Tensor> gradients;
  std::vector<bool> failed;
};

void note_store(Outcome& outcome, int worker, const std::vector<at::Tensor>& gradients) {
  static constexpr const char* kNames[] = {"scale", "table", "unused"};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    outcome.gradients[fmt::format("worker{}.{}", worker, kNames[i])] = gradients[i];
  }
}

Outcome run_locally(const Program& program) {
  Outcome outcome;
  LocalCalls calls(program.workers);
  const auto inputs = inputs_of(program);
  const auto values = run(program, inputs, calls);
  for (std::size_t pass = 0; pass < program.losses.size(); ++pass) {
    const at::Tensor loss = loss_of(values, program.losses[pass]);
    if (!loss.requires_grad()) continue;
    loss.backward({}, program.retain[pass]);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i)
    outcome.gradients[fmt::format("input{}", i)] = inputs[i].grad();
  for (int worker = 0; worker < program.workers; ++worker) {
    const Store& store = calls.stores[static_cast<std::size_t>(worker)];
    note_store(outcome, worker, {store.scale_weight.grad(), store.table.grad(), store.unused.grad()});
  }
  return outcome;
}

ClusterOptions cluster(int workers, std::uint64_t seed) {
  ClusterOptions options;
  options.workers = workers;
  options.seed = seed;
  options.functions.add(kStore, kScale, kLookUp, kMultiply, kSine, kSplit, kDetached, kInPlace, kMixed,
                        kUnite, kOnwards, kByReference, kWasteful, kGradientsOf);
  options.extensions = [] {
    std::vector<std::unique_ptr<rpc::Extension>> extensions;
    extensions.push_back(std::make_unique<Passes>());
    return extensions;
  };
  return options;
}

Outcome run_remotely(const Program& program, std::uint64_t seed) {
  Outcome outcome;
  ClusterOptions options = cluster(program.workers, seed);
  options.network.jitter = std::chrono::microseconds(seed % 3 == 0 ? 0 : 200);
  SimCluster world(options);
  world.run([&](Worker& worker) {
    if (worker.rank() != 0) return;
    const auto inputs = inputs_of(program);
    Context context(worker);
    RemoteCalls calls(worker, program.workers);
    const auto values = run(program, inputs, calls);
    for (std::size_t pass = 0; pass < program.losses.size(); ++pass) {
      const at::Tensor loss = loss_of(values, program.losses[pass]);
      if (!loss.requires_grad()) continue;
      context.backward(loss, {.retain_graph = program.retain[pass], .timeout = std::chrono::seconds(20)});
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      outcome.gradients[fmt::format("input{}", i)] = context.gradient(inputs[i]);
    }
    for (int rank = 0; rank < program.workers; ++rank) {
      note_store(outcome, rank, calls.stores[static_cast<std::size_t>(rank)].rpc_sync(kGradientsOf));
    }
  });
  return outcome;
}

long number_from(const char* variable, long otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atol(text);
}

/// TORCHSPAN_CASES and TORCHSPAN_SEED run more, or one again.
TEST(RandomPrograms, HaveTheGradientsOfOneProcessAndNoOthers) {
  const long cases = number_from("TORCHSPAN_CASES", 320), first = number_from("TORCHSPAN_SEED", 1);
  int with_gradient = 0, without = 0;
  for (long seed = first; seed < first + cases; ++seed) {
    const Program program = make_program(static_cast<std::uint64_t>(seed));
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, program.text()));
    const Outcome expected = run_locally(program);
    Outcome ours;
    try {
      ours = run_remotely(program, static_cast<std::uint64_t>(seed));
    } catch (const std::exception& error) {
      FAIL() << error.what();
    }
    ASSERT_EQ(ours.gradients.size(), expected.gradients.size());
    for (const auto& [name, value] : expected.gradients) {
      const at::Tensor& mine = ours.gradients.at(name);
      ASSERT_EQ(mine.defined(), value.defined()) << name;
      ++(value.defined() ? with_gradient : without);
      if (!value.defined()) continue;
      EXPECT_EQ(mine.is_sparse(), value.is_sparse()) << name;
      ASSERT_TRUE(at::allclose(mine.to_dense(), value.to_dense(), 1e-12, 1e-12)) << name << mine << value;
    }
  }
  EXPECT_GT(with_gradient, cases / 2) << "the cases compared too little";
  EXPECT_GT(without, cases / 2);
}

}  // namespace
}  // namespace torchspan
