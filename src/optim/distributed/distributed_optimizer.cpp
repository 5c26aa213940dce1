#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <string>

#include <torch/nn/module.h>

#include <torchspan/detail/autograd/extension.h>
#include <torchspan/optim/distributed_optimizer.h>

#include "core/api/agreement.h"
#include "core/api/parse_number.h"
#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"
#include "optim/distributed/messages.h"
#include "optim/parameters.h"
#include "optim/state_sources.h"

namespace torchspan::optim {
namespace {

constexpr std::string_view kClipGradNorm = "clip_grad_norm";

/// What a replica sends to the others.
struct ReplicaNorm {
  double norm = 0;
  double max_norm = 0;
  double norm_type = 0;

  static constexpr std::size_t kBytes = 3 * sizeof(double);
  Bytes to_bytes() const {
    ByteWriter writer;
    writer.put(norm);
    writer.put(max_norm);
    writer.put(norm_type);
    return writer.take();
  }
  static ReplicaNorm from_bytes(BytesView bytes) {
    ByteReader reader(bytes);
    ReplicaNorm norm;
    norm.norm = reader.get<double>();
    norm.max_norm = reader.get<double>();
    norm.norm_type = reader.get<double>();
    return norm;
  }
};

/// The bytes of release 0.1.0: a ReplicaNorm, then the text of a failure.
constexpr OutcomeFormat kNormFormat{
    .encode =
        [](const RankOutcome& outcome) {
          ByteWriter writer(outcome.failure ? Bytes(ReplicaNorm::kBytes) : outcome.result);
          writer.put_string(outcome.failure ? outcome.failure->message() : "");
          return writer.take();
        },
    .decode =
        [](BytesView bytes) {
          ByteReader reader(bytes);
          const BytesView norm = reader.get_bytes(ReplicaNorm::kBytes);
          const std::string failure = reader.get_string();
          RankOutcome outcome{.result = Bytes(norm.begin(), norm.end())};
          if (!failure.empty()) outcome.failure = Error(ErrorKind::kRemoteFailure, failure);
          return outcome;
        }};

void check(const ReplicaNorm& mine, const ReplicaNorm& theirs, const std::string& name, const char* verb) {
  if (mine.max_norm == theirs.max_norm && mine.norm_type == theirs.norm_type) return;
  throw_invalid(
      "{}(): replica '{}' uses {} = {} and norm_type = {}, this one {} and {}; use the same on all replicas",
      verb, name, std::string_view(verb) == kClipGradNorm ? "max_norm" : "factor", theirs.max_norm,
      theirs.norm_type, mine.max_norm, mine.norm_type);
}

/// Returns the largest of the norms that `norm_here` returns on the replicas. Collective over options.replicas; the
/// failure of one replica fails all. `verb` is the function that the program called.
double largest_norm(const Worker& worker, const ClipOptions& options, const char* verb,
                    const std::function<double()>& norm_here) {
  std::vector<std::string> names;
  const auto self = static_cast<int>(worker.rank());
  if (std::find(options.replicas.begin(), options.replicas.end(), self) == options.replicas.end()) {
    throw_invalid("{}(): this worker, rank {}, is not among the replicas", verb, self);
  }
  for (const int rank : options.replicas) names.push_back(worker.info(rank).name);
  ReplicaNorm mine{0, options.max_norm, options.norm_type};
  const RankOutcome own = outcome_of([&] {
    mine.norm = norm_here();
    return mine.to_bytes();
  });
  const auto gather = [&](BytesView bytes) {
    return worker.backend()->all_gather_bytes(
        std::string("optim.") + verb, Bytes(bytes.begin(), bytes.end()), names,
        worker.runtime().executor.deadline_in(no_limit_if_zero(options.timeout)));
  };
  const auto refusal = [&](std::size_t replica, const Error& failure) {
    if (own.failure) return *own.failure;
    return Error(ErrorKind::kRemoteFailure, fmt::format("{}(): replica '{}' could not compute its norm: {}",
                                                        verb, names[replica], failure.message()))
        .with_worker(names[replica]);
  };
  const std::vector<Bytes> all = all_or_none(gather, own, refusal, kNormFormat);
  double largest = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const ReplicaNorm theirs = ReplicaNorm::from_bytes(all[i]);
    check(mine, theirs, names[i], verb);
    const bool number = !std::isnan(theirs.norm) && !std::isnan(largest);
    largest = number ? std::max(largest, theirs.norm) : std::numeric_limits<double>::quiet_NaN();
  }
  return largest;
}

/// Throws Error{kInvalid}: replicas that clip by different norms would diverge.
[[noreturn]] void refuse_local_norm(const std::string& averaged, const std::string& own, const char* verb) {
  throw_invalid(
      "{}(): the gradient of {} is an average over replicas, and that of {} is not. Each replica would "
      "decide by different gradients, and their parameters would diverge without an error: name the replicas "
      "({}) on all of them, or use a separate optimizer for the averaged parameters",
      verb, averaged, own,
      std::string_view(verb) == kClipGradNorm
          ? "clip_grad_norm(context, {.max_norm = …, .replicas = group.ranks()})"
          : "GradScalerOptions::replicas = group.ranks()");
}

using Owner = std::uint32_t;

std::string name_of(const Worker& worker, Owner rank) {
  for (const WorkerInfo& info : worker.workers()) {
    if (info.rank == rank) return info.name;
  }
  return fmt::format("rank {}", rank);
}

/// Sends a request to an owner. The answer has every failure, also if the owner is gone.
template <rpc::Message M>
Future<typename M::Reply> ask(const Worker& worker, Owner owner, const M& message) {
  rpc::Request request = rpc::make_request(message);
  worker.backend()->apply({}, request);
  auto completion =
      std::make_shared<rpc::PromiseCompletion<typename M::Reply>>(worker.backend()->continuations());
  auto answer = completion->future();
  worker.backend()->send(owner, std::move(request), std::move(completion));
  return answer;
}

/// Asks an owner to destroy an optimizer, repeatedly until it answers, is gone, or this worker stops. If this
/// worker dies, the owner destroys the optimizer without a request.
class DropRequest final : public rpc::Completion {
 public:
  static void send(const std::shared_ptr<rpc::WorkerBackend>& worker, Owner owner,
                   const DropOptimizer& message, int attempt = 0) {
    rpc::Request request = rpc::make_request(message);
    request.deadline = worker->runtime().executor.deadline_in(kPatience);
    worker->send(owner, std::move(request),
                 std::shared_ptr<DropRequest>(new DropRequest(worker, owner, message, attempt)));
  }
  void succeed(wire::Payload&) override {}
  void fail(std::exception_ptr error) override {
    const auto worker = worker_.lock();
    if (!worker || worker->is_stopping() || !worker->is_present(owner_)) return;
    const ErrorKind kind = to_error(error).kind();
    if (kind != ErrorKind::kOverloaded && kind != ErrorKind::kDisconnected && kind != ErrorKind::kTimedOut)
      return;
    worker->after(kPause * (1 << std::min(attempt_, 6)),
                  [weak = worker_, owner = owner_, message = message_, next = attempt_ + 1] {
                    if (const auto alive = weak.lock()) send(alive, owner, message, next);
                  });
  }

 private:
  static constexpr Duration kPatience = std::chrono::seconds(30), kPause = std::chrono::milliseconds(50);
  DropRequest(std::weak_ptr<rpc::WorkerBackend> worker, Owner owner, const DropOptimizer& message,
              int attempt)
      : worker_(std::move(worker)), owner_(owner), message_(message), attempt_(attempt) {}

  const std::weak_ptr<rpc::WorkerBackend> worker_;
  const Owner owner_;
  const DropOptimizer message_;
  const int attempt_;
};

void check_alive(const Worker& worker, const autograd::ContextView& context, const char* verb) {
  worker.backend()->check_running();
  if (worker.extension<autograd::AutogradExtension>().try_find(context.id())) return;
  throw_invalid(
      "{} got autograd context {:#x}, which has ended, and its gradients with it; call it before release()",
      verb, context.id());
}

/// Waits for the answers of all owners. Throws their failures as one Error.
template <class R>
std::map<Owner, R> collect(const Worker& worker, const std::string& what,
                           const std::map<Owner, Future<R>>& answers) {
  std::map<Owner, R> results;
  std::vector<std::pair<Owner, std::exception_ptr>> failures;
  for (const auto& [owner, answer] : answers) {
    try {
      results.emplace(owner, answer.wait());
    } catch (...) {
      failures.emplace_back(owner, std::current_exception());
    }
  }
  if (failures.empty()) return results;
  if (failures.size() == 1) std::rethrow_exception(failures.front().second);
  std::string text = fmt::format("{} failed on {} of {} workers:", what, failures.size(), answers.size());
  for (const auto& [owner, failure] : failures) {
    text += fmt::format("\n  worker '{}': {}", name_of(worker, owner), to_error(failure).message());
  }
  throw Error(to_error(failures.front().second).kind(), text);
}

/// Parses a number in a name; SIZE_MAX, which no group or target has, if it is not a number.
std::size_t index_of(std::string_view text) { return parse_number<std::size_t>(text).value_or(SIZE_MAX); }

/// Removes the part of a name before its next dot and returns it.
std::string_view take_part(std::string_view& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  const std::string_view part = name.substr(0, dot);
  name.remove_prefix(std::min(dot + 1, name.size()));
  return part;
}

}  // namespace

Target::Target(const std::shared_ptr<torch::nn::Module>& module) {
  if (!module) throw_invalid("a target is a null module; construct the module first");
  for (auto& [name, parameter] : named_parameters_of(*module)) {
    names_.push_back(name);
    tensors_.push_back(parameter);
  }
  if (tensors_.empty()) throw_invalid("a target module has no parameters that can be trained");
}

DistributedOptimizer::DistributedOptimizer(const Worker& worker,
                                           const std::vector<DistributedParamGroup>& groups)
    : worker_(worker) {
  std::map<Owner, CreateOptimizer> messages;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    owners_.emplace_back();
    kinds_.push_back(groups[g].spec.kind);
    rates_.push_back(groups[g].spec.lr);
    const auto add = [&](const rpc::ReferencePtr& reference, std::string name) {
      std::vector<OptimizerGroup>& there = messages[reference->owner()].groups;
      const std::string label = std::to_string(g);
      if (there.empty() || there.back().label != label) {
        there.push_back({label, groups[g].spec, {}, groups[g].hogwild});
        shares_[reference->owner()].groups.push_back(g);
      }
      there.back().targets.push_back({reference, std::move(name)});
    };
    if (groups[g].targets.empty()) {
      throw_invalid("group {} of a DistributedOptimizer has no targets; add at least one", g);
    }
    for (const Target& target : groups[g].targets) {
      const std::string index = std::to_string(owners_[g].size());
      const bool remote = target.reference() != nullptr;
      if (!remote && target.tensors().empty()) throw_invalid("a target is an empty RRef");
      owners_[g].push_back(remote ? target.reference()->owner() : worker_.rank());
      if (remote) add(target.reference(), index);
      for (std::size_t i = 0; i < target.tensors().size(); ++i) {
        const bool named = i < target.names().size();
        add(RRef<at::Tensor>(worker_, target.tensors()[i]).state(),
            named ? fmt::format("{}.{}", index, target.names()[i]) : index);
      }
    }
  }
  if (groups.empty()) throw_invalid("a DistributedOptimizer needs at least one group");
  std::map<Owner, Future<Unit>> answers;
  for (auto& [owner, message] : messages) {
    message.id = worker_.backend()->next_id();
    shares_[owner].id = message.id.local;
    answers.emplace(owner, ask(worker_, owner, message));
  }
  try {
    collect(worker_, "creating the optimizer", answers);
  } catch (...) {
    drop();
    throw;
  }
}

DistributedOptimizer::~DistributedOptimizer() { drop(); }

void DistributedOptimizer::drop() noexcept {
  try {
    for (const auto& [owner, share] : shares_)
      DropRequest::send(worker_.backend(), owner, DropOptimizer{id_on(owner)});
  } catch (...) {  // out of memory: the owners destroy them when this worker ends
  }
}

std::vector<double> DistributedOptimizer::rates_on(Owner owner) const {
  std::vector<double> rates;
  for (const std::size_t group : shares_.at(owner).groups) rates.push_back(rates_[group]);
  return rates;
}

DistributedOptimizer::ContextUse& DistributedOptimizer::use_of(const autograd::ContextView& context,
                                                               const char* verb) {
  check_alive(worker_, context, verb);
  auto& contexts = worker_.extension<autograd::AutogradExtension>();
  std::erase_if(uses_, [&](const auto& one) { return !contexts.try_find(one.first); });
  return uses_[context.id()];
}

void DistributedOptimizer::step(const autograd::ContextView& context) {
  const double scale = std::exchange(use_of(context, "step()").factor, 1);
  std::map<Owner, Future<bool>> answers;
  for (const auto& [owner, share] : shares_) {
    answers.emplace(owner,
                    ask(worker_, owner, StepOptimizer{id_on(owner), context.id(), rates_on(owner), scale}));
  }
  bool saw_pass = context.saw_backward();
  for (const auto& [owner, saw] : collect(worker_, "the optimizer step", answers)) saw_pass = saw_pass || saw;
  if (!saw_pass) {
    throw_invalid(
        "step() found no backward pass in autograd context {:#x}, here or on the owners of the parameters, "
        "and no gradient: call context.backward(loss) before step()",
        context.id());
  }
  Log& log = worker_.runtime().log;
  if (log.enabled(LogLevel::kDebug))
    log.debug(fmt::format("optimizer step on {} workers, context {:#x}", shares_.size(), context.id()));
}

void DistributedOptimizer::step_in_backward(const autograd::ContextView& context) {
  ContextUse& use = use_of(context, "step_in_backward()");
  std::map<Owner, Future<Unit>> answers;
  for (const auto& [owner, share] : shares_) {
    context.add_worker(owner);  // this may be the owner's only message in the context
    answers.emplace(owner, ask(worker_, owner, StepInBackward{id_on(owner), context.id(), rates_on(owner)}));
  }
  collect(worker_, "requesting steps in backward", answers);
  use.steps_in_backward = true;
}

double DistributedOptimizer::clip_grad_norm(const autograd::ContextView& context, double max_norm,
                                            double norm_type) {
  return clip_grad_norm(context, ClipOptions{.max_norm = max_norm, .norm_type = norm_type});
}

double DistributedOptimizer::clip_grad_norm(const autograd::ContextView& context,
                                            const ClipOptions& options) {
  clip_factor(0, options.max_norm);  // checks the option before any message
  double& factor = use_of(context, "clip_grad_norm()").factor;
  const double norm = norm_of(context, options, "clip_grad_norm") * factor;
  factor *= clip_factor(norm, options.max_norm);
  return norm;
}

bool DistributedOptimizer::scale_gradients(const autograd::ContextView& context, double factor,
                                           const std::vector<int>& replicas) {
  ContextUse& use = use_of(context, "scale_gradients()");
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw_invalid("scale_gradients(): factor = {}, but it must be a number above 0", factor);
  }
  const ClipOptions options{.max_norm = factor,  // compared between replicas
                            .norm_type = std::numeric_limits<double>::infinity(),
                            .replicas = replicas};
  const bool finite = std::isfinite(norm_of(context, options, "scale_gradients"));
  use.factor = factor;
  return finite;
}

double DistributedOptimizer::norm_of(const autograd::ContextView& context, const ClipOptions& options,
                                     const char* verb) {
  const auto norm_here = [&] {
    if (uses_[context.id()].steps_in_backward) {
      throw_invalid(
          "{}() needs all gradients, but step_in_backward() of this optimizer steps autograd context {:#x} "
          "during backward(); call step() after it instead",
          verb, context.id());
    }
    std::map<Owner, Future<GradientNorm>> answers;
    for (const auto& [owner, share] : shares_) {
      answers.emplace(owner,
                      ask(worker_, owner, NormOfGradients{id_on(owner), context.id(), options.norm_type}));
    }
    std::vector<double> norms;
    std::string averaged, own;
    for (const auto& [owner, part] : collect(worker_, "the norm of gradients", answers)) {
      const std::string place = fmt::format(" on worker '{}'", name_of(worker_, owner));
      norms.push_back(part.norm);
      if (averaged.empty() && !part.averaged.empty()) averaged = part.averaged + place;
      if (own.empty() && !part.own.empty()) own = part.own + place;
    }
    if (options.replicas.empty() && !averaged.empty() && !own.empty()) refuse_local_norm(averaged, own, verb);
    return gradient_norm({at::tensor(norms, at::kDouble)}, options.norm_type);
  };
  return options.replicas.empty() ? norm_here() : largest_norm(worker_, options, verb, norm_here);
}

void DistributedOptimizer::set_lr(double lr) {
  for (std::size_t g = 0; g < rates_.size(); ++g) set_lr(g, lr);
}

void DistributedOptimizer::set_lr(std::size_t group, double lr) {
  check_not_negative(kinds_.at(group), "lr", lr);
  rates_[group] = lr;
}

void DistributedOptimizer::set_lrs(const std::vector<double>& rates) {
  if (rates.size() != rates_.size()) {
    throw_invalid("there are {} groups and {} learning rates; pass one for each group", rates_.size(),
                  rates.size());
  }
  for (std::size_t g = 0; g < rates.size(); ++g) {
    if (!std::isnan(rates[g])) set_lr(g, rates[g]);
  }
}

state::SourcePtr DistributedOptimizer::state_source() { return source_of(*this); }

StateDict DistributedOptimizer::state_dict() {
  std::map<Owner, Future<StateDict>> answers;
  for (const auto& [owner, share] : shares_) {
    answers.emplace(owner, ask(worker_, owner, ReadState{id_on(owner), rates_on(owner)}));
  }
  StateDict whole;
  for (const auto& [owner, part] : collect(worker_, "reading the optimizer state", answers)) {
    for (const auto& entry : part) {
      // Each owner of a group sends its kind and rate.
      if (!whole.contains(entry.key())) whole.insert(entry.key(), entry.value());
    }
  }
  return whole;
}

std::map<Owner, StateDict> DistributedOptimizer::split(const StateDict& state) const {
  std::map<Owner, StateDict> parts;
  for (const auto& entry : state) {
    std::string_view rest = entry.key();
    const bool is_group = take_part(rest) == "group";
    const std::size_t group = index_of(take_part(rest));
    const bool of_parameter = take_part(rest) == "parameter";
    const std::size_t target = index_of(take_part(rest));
    if (!is_group || group >= owners_.size() || (of_parameter && target >= owners_[group].size())) {
      throw_invalid(
          "the optimizer state does not match: it has '{}', but this optimizer has no such group or target",
          entry.key());
    }
    for (const auto& [owner, share] : shares_) {
      const bool has_group = std::find(share.groups.begin(), share.groups.end(), group) != share.groups.end();
      if (of_parameter ? owners_[group][target] == owner : has_group) {
        parts[owner].insert(entry.key(), entry.value());
      }
    }
  }
  return parts;
}

void DistributedOptimizer::load_state_dict(const StateDict& state) {
  std::map<Owner, StateDict> parts = split(state);
  std::map<Owner, Future<Unit>> answers;
  for (const auto& [owner, share] : shares_) {
    answers.emplace(owner, ask(worker_, owner, WriteState{id_on(owner), parts[owner]}));
  }
  collect(worker_, "loading the optimizer state", answers);
  for (std::size_t g = 0; g < rates_.size(); ++g) {
    rates_[g] = state[fmt::format("group.{}.lr", g)].item<double>();
  }
}

std::vector<RRef<StateDict>> DistributedOptimizer::state_shards() {
  std::map<Owner, Future<RRef<StateDict>>> answers;
  for (const auto& [owner, share] : shares_) {
    answers.emplace(owner, ask(worker_, owner, KeepState{id_on(owner), rates_on(owner)}));
  }
  std::vector<RRef<StateDict>> shards;
  for (const auto& [owner, shard] : collect(worker_, "keeping the optimizer state", answers)) {
    shards.push_back(shard);
  }
  return shards;
}

void DistributedOptimizer::load_state_shards(const std::vector<RRef<StateDict>>& shards) {
  std::map<Owner, RRef<StateDict>> by_owner;
  for (const RRef<StateDict>& shard : shards) by_owner[shard.owner().rank] = shard;
  for (const auto& [owner, share] : shares_) {
    if (by_owner.contains(owner)) continue;
    throw_invalid("no shard is on worker '{}', which owns parameters; pass the result of state_shards()",
                  name_of(worker_, owner));
  }
  std::map<Owner, Future<std::vector<double>>> answers;
  for (const auto& [owner, share] : shares_) {
    answers.emplace(owner, ask(worker_, owner, TakeState{id_on(owner), by_owner[owner]}));
  }
  for (const auto& [owner, rates] : collect(worker_, "loading the optimizer state", answers)) {
    const std::vector<std::size_t>& groups = shares_.at(owner).groups;
    for (std::size_t i = 0; i < groups.size() && i < rates.size(); ++i) rates_[groups[i]] = rates[i];
  }
}

}  // namespace torchspan::optim
