#include <cstdlib>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <map>
#include <set>

#include "pipeline/random_model.h"
#include "tests/support/environment.h"
#include "tests/support/pipeline_world.h"

namespace torchspan::pipeline::testing {
namespace {

std::string name_of(const char* kind, int object, const std::string& member) {
  return fmt::format("{}{}.{}", kind, object, member);
}

}  // namespace

namespace {

/// Draws operations of which each takes the result of the one before.
class Builder {
 public:
  explicit Builder(std::mt19937_64& random) : random_(random) {}

  RandomModel build(int length) {
    while (static_cast<int>(model_.operations.size()) < length) add_one();
    if (several_) add({Operation::kUnite, 0, ""});
    while (!open_.empty()) {
      add({Operation::kPop, 0, open_.back()});
      open_.pop_back();
    }
    model_.weights = random_();
    return model_;
  }

 private:
  int pick(int below) { return static_cast<int>(random_() % static_cast<std::uint64_t>(below)); }
  void add(Operation operation) { model_.operations.push_back(std::move(operation)); }
  int object(int& count, int percent_fresh) {
    if (count == 0 || pick(100) < percent_fresh) return count++;
    return pick(count);
  }
  /// Whether nothing else holds the result of the operation before.
  bool may_change_in_place() const {
    if (model_.operations.empty()) return false;
    const Operation::Kind before = model_.operations.back().kind;
    return before == Operation::kNorm || before == Operation::kPop || before == Operation::kStash ||
           before == Operation::kDrop;
  }
  void add_one() {
    if (several_) {
      const int what = pick(3);
      if (what == 0) return add({Operation::kScale, object(scales_, 60), ""});
      several_ = false;
      return add({what == 1 ? Operation::kUnite : Operation::kChoose, 0, ""});
    }
    switch (pick(10)) {
      case 0:
        several_ = true;
        return add({Operation::kFork, 0, ""});
      case 1:
        return add({Operation::kDrop, 0, ""});
      case 2:
        return add({Operation::kNorm, object(norms_, 60), ""});
      case 3:
        if (!may_change_in_place()) break;
        return add({Operation::kInPlace, 0, ""});
      case 4:
        if (denses_ == 0) break;
        return add({Operation::kDenseBack, pick(denses_), ""});
      case 5:
        open_.push_back(fmt::format("skip{}", skips_++));
        return add({Operation::kStash, 0, open_.back()});
      case 6:
        if (open_.empty()) break;
        add({Operation::kPop, 0, open_.front()});
        open_.erase(open_.begin());
        return;
      default:
        break;
    }
    add({Operation::kDense, object(denses_, 60), ""});
  }

  std::mt19937_64& random_;
  RandomModel model_;
  bool several_ = false;
  int denses_ = 0, norms_ = 0, scales_ = 0, skips_ = 0;
  std::vector<std::string> open_;
};

/// The modules of the plain loop, created at their first use.
struct Objects {
  explicit Objects(std::uint64_t weights) : seed(weights) {}
  Dense dense(int i) {
    return denses.try_emplace(i, Dense(seed + 10 * static_cast<std::uint64_t>(i))).first->second;
  }
  Scale scale(int i) {
    return scales.try_emplace(i, Scale(seed + 7777 + static_cast<std::uint64_t>(i))).first->second;
  }
  std::uint64_t seed;
  std::map<int, Dense> denses;
  std::map<int, Scale> scales;
  std::map<int, torch::nn::BatchNorm1d> norms;
  torch::nn::BatchNorm1d norm(int i) {
    auto [found, fresh] = norms.try_emplace(i, torch::nn::BatchNorm1d(kWidth));
    if (fresh) found->second->to(at::kDouble);
    return found->second;
  }
};

DeferredBatchNorm double_norm() {
  DeferredBatchNorm norm(torch::nn::BatchNormOptions{kWidth});
  norm->to(at::kDouble);
  return norm;
}

std::string describe(const Operation& operation) {
  static constexpr const char* kNames[] = {"dense", "dense.back", "norm",   "drop",  "in_place", "fork",
                                           "scale", "unite",      "choose", "stash", "pop",      "cut"};
  return fmt::format("{}{}{}", kNames[operation.kind], operation.object, operation.skip);
}

}  // namespace

namespace {

/// Adds a stateless operation.
void add_function(const Operation& operation, Layers& layers) {
  const std::string name = operation.skip;
  switch (operation.kind) {
    case Operation::kDrop:
      layers.add_function("drop", [](const at::Tensor& x) { return drop(x); });
      break;
    case Operation::kInPlace:
      layers.add_function("in_place", [](at::Tensor x) { return x.mul_(1.5); });
      break;
    case Operation::kFork:
      layers.add_function("fork", [](const at::Tensor& x) { return fork(x); });
      break;
    case Operation::kUnite:
      layers.add_function("unite", [](const Several& all) { return unite(all); });
      break;
    case Operation::kChoose:
      layers.add_function("choose", [](const Several& all) { return choose(all); });
      break;
    case Operation::kStash: {
      const auto stash = [name](const at::Tensor& x, Skips& skips) {
        skips.stash(name, x * 0.5);
        return x + 1;
      };
      layers.add_function("stash", stash).stashes(name);
      break;
    }
    case Operation::kPop: {
      const auto pop = [name](const at::Tensor& x, Skips& skips) { return x + skips.pop(name); };
      layers.add_function("pop", pop).pops(name);
      break;
    }
    default:
      FAIL() << "not a function: " << describe(operation);
  }
}

/// Adds a layer with parameters, or uses it again.
template <class T, class Make>
void add_object(const char* kind, int number, std::map<int, Use<T>>& known, Layers& layers,
                const Make& make) {
  if (known.contains(number)) {
    layers.reuse(known.at(number));
  } else {
    known.emplace(number, make().named(fmt::format("{}{}", kind, number)));
  }
}

}  // namespace

Layers layers_of(const RandomModel& model) {
  Layers layers;
  std::map<int, Use<DenseImpl>> denses;
  std::map<int, Use<ScaleImpl>> scales;
  std::map<int, Use<DeferredBatchNormImpl>> norms;
  const std::uint64_t seed = model.weights;
  for (const Operation& operation : model.operations) {
    const int i = operation.object;
    const auto number = static_cast<std::uint64_t>(i);
    switch (operation.kind) {
      case Operation::kDense:
        add_object("dense", i, denses, layers, [&] { return layers.add<Dense>(seed + 10 * number); });
        break;
      case Operation::kDenseBack:
        layers.reuse(denses.at(i), "back", &DenseImpl::back);
        break;
      case Operation::kScale:
        add_object("scale", i, scales, layers, [&] { return layers.add<Scale>(seed + 7777 + number); });
        break;
      case Operation::kNorm:
        add_object("norm", i, norms, layers, [&] { return layers.add_existing(double_norm()); });
        break;
      default:
        add_function(operation, layers);
    }
  }
  return layers;
}

at::Tensor loss_between(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).square().mean();
}
at::Tensor input_of(const RandomCase& random, std::size_t step) {
  return seeded({random.rows[step], kWidth}, random.model.weights + 31 * step);
}
at::Tensor target_of(const RandomCase& random, std::size_t step) {
  return seeded({random.rows[step], kWidth}, random.model.weights + 57 * step + 5);
}

namespace {

/// A searched schedule with split backwards, or 1F1B in which a random part of the backwards is split, with weight
/// gradients at random later places.
std::function<schedule::Table(const schedule::Placement&)> random_schedule(std::uint64_t seed) {
  return [seed](const schedule::Placement& placement) {
    std::mt19937_64 random(seed);
    if (random() % 3 == 0) return schedule::zero_bubble(placement, {schedule::Costs{}});
    schedule::Table table = schedule::one_forward_one_backward(placement);
    for (auto& row : table.actions) {
      for (std::size_t at = 0; at < row.size(); ++at) {
        if (row[at].kind != schedule::ActionKind::kBackward || random() % 4 == 0) continue;
        row[at].kind = schedule::ActionKind::kInputGradient;
        schedule::Action weights = row[at];
        weights.kind = schedule::ActionKind::kWeightGradient;
        const std::size_t place = at + 1 + random() % (row.size() - at);
        row.insert(row.begin() + static_cast<std::ptrdiff_t>(place), weights);
      }
    }
    return table;
  };
}

}  // namespace

RandomCase make_case(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int below) { return static_cast<int>(random() % static_cast<std::uint64_t>(below)); };
  RandomCase made;
  made.model = Builder(random).build(1 + pick(12));
  const Layers layers = layers_of(made.model);
  const int distinct = static_cast<int>(layers.specs().size());
  made.workers = 1 + pick(std::min(4, distinct));
  const int stages = made.workers + pick(std::min(made.workers, distinct - made.workers) + 1);
  std::vector<int> balance(static_cast<std::size_t>(stages), 1);
  for (int layer = stages; layer < distinct; ++layer) ++balance[static_cast<std::size_t>(pick(stages))];
  made.options.balance = balance;
  made.options.micro_batches = 1 + pick(6);
  const int kind = pick(6);
  made.options.schedule = kind < 3 ? static_cast<Schedule>(kind) : Schedule::kCustom;
  if (kind >= 3) made.options.custom_schedule = random_schedule(random());
  made.options.max_in_flight = pick(3) == 0 ? 1 + pick(3) : 0;
  made.options.seed = random();
  const bool in_place = std::any_of(made.model.operations.begin(), made.model.operations.end(),
                                    [](const Operation& o) { return o.kind == Operation::kInPlace; });
  made.options.checkpoint =
      in_place ? ActivationCheckpoint::kNever : static_cast<ActivationCheckpoint>(pick(3));
  const bool norms = std::any_of(made.model.operations.begin(), made.model.operations.end(),
                                 [](const Operation& o) { return o.kind == Operation::kNorm; });
  // One row has no variance.
  const int least = norms ? 2 * made.options.micro_batches : 1;
  for (int step = 0; step < 2; ++step) made.rows.push_back(least + pick(12));
  if (made.options.checkpoint != ActivationCheckpoint::kNever && pick(2) == 0) {
    for (int layer = 0; layer < distinct; ++layer) {
      if (pick(2) == 0) made.options.checkpoint_layers.push_back(layer);
    }
  }
  for (const Operation& operation : made.model.operations) made.text += describe(operation) + " ";
  made.text += fmt::format(
      "| {} workers, {} stages, {} micro-batches, schedule {}, checkpoint {} of layers {}, in flight {}, "
      "rows {} "
      "{}",
      made.workers, stages, made.options.micro_batches, static_cast<int>(made.options.schedule),
      static_cast<int>(made.options.checkpoint), made.options.checkpoint_layers, made.options.max_in_flight,
      made.rows[0], made.rows[1]);
  return made;
}

namespace {

/// Runs one micro-batch through the plain model.
class PlainPass {
 public:
  PlainPass(const RandomModel& model, Objects& objects, std::map<std::size_t, std::vector<at::Tensor>>& seen)
      : model_(model), objects_(objects), seen_(seen) {}

  at::Tensor run(at::Tensor x, std::uint64_t seed, std::uint64_t step, int micro_batch) {
    Several several;
    std::map<std::string, at::Tensor> aside;
    for (std::size_t order = 0; order < model_.operations.size(); ++order) {
      const Operation& operation = model_.operations[order];
      torch::manual_seed(seed_of_use(seed, step, static_cast<int>(order), micro_batch));
      switch (operation.kind) {
        case Operation::kDense:
          x = objects_.dense(operation.object)->forward(x);
          break;
        case Operation::kDenseBack:
          x = objects_.dense(operation.object)->back(x);
          break;
        case Operation::kNorm: {
          seen_[order].push_back(x.detach());
          auto norm = objects_.norm(operation.object);
          x = at::batch_norm(x, norm->weight, norm->bias, {}, {}, true, 0.0, 1e-5, false);
          break;
        }
        case Operation::kDrop:
          x = drop(x);
          break;
        case Operation::kInPlace:
          x = x * 1.5;
          break;
        case Operation::kFork:
          several = fork(x);
          break;
        case Operation::kScale:
          several = std::apply([&](auto&... a) { return objects_.scale(operation.object)->forward(a...); },
                               several);
          break;
        case Operation::kUnite:
          x = unite(several);
          break;
        case Operation::kChoose:
          x = choose(several);
          break;
        case Operation::kCut:
          x = x.detach();
          break;
        case Operation::kStash:
          aside[operation.skip] = x * 0.5;
          x = x + 1;
          break;
        case Operation::kPop:
          x = x + aside.at(operation.skip);
          break;
      }
    }
    return x;
  }

 private:
  const RandomModel& model_;
  Objects& objects_;
  std::map<std::size_t, std::vector<at::Tensor>>& seen_;
};

/// Updates running statistics as BatchNorm does for the whole batch, at each use.
void update_norms(const RandomModel& model, Objects& objects,
                  const std::map<std::size_t, std::vector<at::Tensor>>& seen) {
  const torch::NoGradGuard guard;
  for (const auto& [order, pieces] : seen) {
    auto norm = objects.norm(model.operations[order].object);
    norm->train();
    norm->forward(at::cat(pieces));
  }
}

void collect(Objects& objects, Outcome& outcome) {
  for (auto& [i, dense] : objects.denses) {
    outcome.gradients[name_of("dense", i, "weight")] = dense->weight.grad();
    outcome.gradients[name_of("dense", i, "bias")] = dense->bias.grad();
  }
  for (auto& [i, scale] : objects.scales)
    outcome.gradients[name_of("scale", i, "scale")] = scale->scale.grad();
  for (auto& [i, norm] : objects.norms) {
    outcome.gradients[name_of("norm", i, "weight")] = norm->weight.grad();
    outcome.gradients[name_of("norm", i, "bias")] = norm->bias.grad();
    for (const auto& buffer : norm->named_buffers()) {
      outcome.buffers[name_of("norm", i, buffer.key())] = buffer.value();
    }
  }
}

}  // namespace

Outcome run_plain_model(const RandomCase& random) {
  Outcome outcome;
  Objects objects(random.model.weights);
  for (std::size_t step = 0; step < random.rows.size(); ++step) {
    const at::Tensor input = input_of(random, step), target = target_of(random, step);
    const std::int64_t rows = random.rows[step];
    const std::int64_t pieces = std::min<std::int64_t>(rows, random.options.micro_batches);
    std::map<std::size_t, std::vector<at::Tensor>> seen;
    PlainPass pass(random.model, objects, seen);
    at::Tensor total = at::zeros({}, at::kDouble);
    std::int64_t first = 0;
    for (std::int64_t i = 0; i < pieces; ++i) {
      const std::int64_t size = rows / pieces + (i < rows % pieces ? 1 : 0);
      const at::Tensor output =
          pass.run(input.narrow(0, first, size), *random.options.seed, step, static_cast<int>(i));
      total = total + loss_between(output, target.narrow(0, first, size)) * (double(size) / double(rows));
      first += size;
    }
    outcome.losses.push_back(total.item<double>());
    if (total.requires_grad()) total.backward();
    update_norms(random.model, objects, seen);
  }
  collect(objects, outcome);
  return outcome;
}

namespace {

void add_outcome(Pipeline& pipe, Outcome& outcome) {
  for (std::size_t layer = 0; layer < pipe.plan().layers.size(); ++layer) {
    const auto module = pipe.module(static_cast<int>(layer));
    if (!module) continue;
    for (const auto& parameter : module->named_parameters()) {
      outcome.gradients[pipe.plan().layers[layer] + "." + parameter.key()] = parameter.value().grad();
    }
    for (const auto& buffer : module->named_buffers()) {
      outcome.buffers[pipe.plan().layers[layer] + "." + buffer.key()] = buffer.value();
    }
  }
}

}  // namespace

Outcome run_in_pipeline(const RandomCase& random, std::uint64_t seed) {
  Outcome outcome;
  torchspan::testing::on_workers(random.workers, seed, [&](Worker& worker) {
    Pipeline pipe(worker, layers_of(random.model), random.options);
    for (std::size_t step = 0; step < random.rows.size(); ++step) {
      const double loss = pipe.train_step(input_of(random, step), target_of(random, step), loss_between);
      if (worker.rank() == 0) outcome.losses.push_back(loss);
    }
    add_outcome(pipe, outcome);
  });
  return outcome;
}

namespace {

bool alike(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  return !a.defined() || at::allclose(a.to(at::kDouble), b.to(at::kDouble), 1e-12, 1e-12);
}

/// Expects the same names with equal tensors.
void expect_equal(const std::map<std::string, at::Tensor>& ours,
                  const std::map<std::string, at::Tensor>& expected) {
  std::set<std::string> names;
  for (const auto& [name, value] : ours) names.insert(name);
  for (const auto& [name, value] : expected) names.insert(name);
  for (const std::string& name : names) {
    ASSERT_TRUE(ours.contains(name)) << name << " is missing in the pipeline";
    ASSERT_TRUE(expected.contains(name)) << name << " is only in the pipeline";
    EXPECT_TRUE(alike(ours.at(name), expected.at(name)))
        << name << "\npipeline: " << ours.at(name) << "\nplain: " << expected.at(name);
  }
}

/// TORCHSPAN_CASES sets the number of cases, TORCHSPAN_SEED repeats one.
// peer: pipe `simple_linears`, test_parity (checkpoint × chunks): better: random models, in double
//   precision to 1e-12
TEST(Oracle, RandomModelsTrainLikeOneProcess) {
  const long cases = torchspan::testing::number_from("TORCHSPAN_CASES", 80);
  const long first = torchspan::testing::number_from("TORCHSPAN_SEED", 1);
  std::size_t gradients = 0;
  for (long seed = first; seed < first + cases; ++seed) {
    const RandomCase random = make_case(static_cast<std::uint64_t>(seed));
    SCOPED_TRACE(fmt::format("TORCHSPAN_SEED={} TORCHSPAN_CASES=1: {}", seed, random.text));
    const Outcome expected = run_plain_model(random);
    const Outcome ours = run_in_pipeline(random, static_cast<std::uint64_t>(seed));
    ASSERT_EQ(ours.losses.size(), expected.losses.size());
    for (std::size_t step = 0; step < expected.losses.size(); ++step) {
      EXPECT_NEAR(ours.losses[step], expected.losses[step],
                  1e-12 * std::max(1.0, std::abs(expected.losses[step])));
    }
    expect_equal(ours.gradients, expected.gradients);
    expect_equal(ours.buffers, expected.buffers);
    for (const auto& [name, value] : expected.gradients) gradients += value.defined() ? 1 : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(gradients, static_cast<std::size_t>(cases)) << "the cases compared too little";
}

}  // namespace
}  // namespace torchspan::pipeline::testing
