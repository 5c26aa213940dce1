#include <algorithm>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <numeric>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <torchspan/core/error.h>

#include "data_parallel/agreement.h"
#include "data_parallel/reducer_impl.h"
#include "engine/api/backward.h"

namespace torchspan::data_parallel {
namespace {

/// Numbers of forwards begin again there.
constexpr std::int32_t kForwardsEnd = 1 << 30;

constexpr double kMebibyte = 1024.0 * 1024.0;

std::string on(bool flag) { return flag ? "true" : "false"; }

/// Its gradient would be gone, and its replicas apart, before the average is there.
constexpr const char* kStepped =
    "is stepped in backward by an optimizer, before its gradient is averaged; end what step_in_backward() "
    "gave, and call step() after backward";

bool is_stepped_in_backward(const at::Tensor& parameter) {
  const auto hooks = engine::gradient_hooks(parameter);
  return std::any_of(hooks.begin(), hooks.end(), [](const engine::GradientHook* hook) {
    return hook->use() == engine::GradientUse::kSteps;
  });
}

void check_replicas(const Reducer::Replicas& replicas) {
  if (replicas.empty() || replicas[0].empty()) {
    throw Error(ErrorKind::kInvalid, "there are no parameters to reduce gradients of");
  }
  bool trainable = false;
  for (const auto& replica : replicas) {
    if (replica.size() != replicas[0].size()) {
      throw Error(ErrorKind::kInvalid, fmt::format("one replica has {} parameters, another {}",
                                                   replicas[0].size(), replica.size()));
    }
    for (std::size_t i = 0; i < replica.size(); ++i) {
      const Parameter& parameter = replica[i];
      const at::Tensor& like = replicas[0][i].tensor;
      const auto refuse = [&](const char* why) {
        throw Error(ErrorKind::kInvalid, fmt::format("parameter '{}' {}", parameter.name, why));
      };
      if (!parameter.tensor.defined()) refuse("is undefined");
      if (is_stepped_in_backward(parameter.tensor)) refuse(kStepped);
      if (parameter.tensor.is_sparse()) refuse("is sparse itself; only its gradient may be");
      if (parameter.tensor.requires_grad() && !parameter.tensor.is_leaf()) {
        refuse("is no leaf of the graph: it was computed, so it has no gradient of its own");
      }
      if (parameter.tensor.device().type() != replicas[0][0].tensor.device().type()) {
        refuse("is on another kind of device than the first parameter");
      }
      if (parameter.tensor.sizes() != like.sizes() || parameter.tensor.strides() != like.strides() ||
          parameter.tensor.scalar_type() != like.scalar_type() ||
          parameter.tensor.requires_grad() != like.requires_grad()) {
        refuse("differs between the replicas of this process in shape, strides, dtype or requires_grad");
      }
      trainable = trainable || parameter.tensor.requires_grad();
    }
  }
  if (!trainable) {
    throw Error(ErrorKind::kInvalid,
                "no parameter requires a gradient, so there is nothing to reduce; use the module as it is");
  }
}

Agreement make_agreement(const Reducer::Replicas& replicas, const DataParallelOptions& options,
                         const collective::Group& group) {
  Agreement mine;
  try {
    options.validate();
    check_replicas(replicas);
    for (const Parameter& parameter : replicas[0]) check_device(group, parameter.name, parameter.tensor);
  } catch (const Error& error) {
    mine.failure = error.message();
    return mine;
  }
  mine.settings = {{"the layout of this handshake", "1"},
                   {"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
                   {"first_bucket_mb", fmt::format("{}", options.first_bucket_mb)},
                   {"bucket_cap_mb_list", fmt::format("[{}]", fmt::join(options.bucket_cap_mb_list, ", "))},
                   {"find_unused_parameters", on(options.find_unused_parameters)},
                   {"static_graph", on(options.static_graph)},
                   {"rebuild_buckets", on(options.rebuild_buckets)},
                   {"broadcast_buffers", on(options.broadcast_buffers)},
                   {"initial_sync", on(options.initial_sync)},
                   {"partial_backward", on(options.partial_backward)},
                   {"the number of replicas in a process", fmt::format("{}", replicas.size())}};
  for (const Parameter& parameter : replicas[0])
    mine.add(parameter.name, parameter.tensor, parameter.sparse_gradient);
  return mine;
}

/// Bytes by bucket, in the order of reduction.
std::vector<std::size_t> limits_of(const DataParallelOptions& options) {
  std::vector<double> mebibytes = options.bucket_cap_mb_list;
  if (mebibytes.empty()) mebibytes = {options.first_bucket_mb, options.bucket_cap_mb};
  std::vector<std::size_t> limits;
  for (const double size : mebibytes)
    limits.push_back(std::max<std::size_t>(static_cast<std::size_t>(size * kMebibyte), 1));
  return limits;
}

/// Those that need gradients: what is reduced.
Reducer::Replicas trainable(Reducer::Replicas replicas) {
  for (auto& replica : replicas) {
    std::erase_if(replica, [](const Parameter& parameter) { return !parameter.tensor.requires_grad(); });
  }
  return replicas;
}

}  // namespace

class Reducer::Impl::SlotHook final : public engine::GradientHook {
 public:
  SlotHook(const std::shared_ptr<Impl>& reducer, std::size_t slot)
      : GradientHook(reducer->tensor(slot), reducer->passes_), reducer_(reducer), slot_(slot) {}
  std::shared_ptr<Impl> reducer() const { return reducer_.lock(); }
  engine::GradientUse use() const override { return engine::GradientUse::kAverages; }
  void gradient_ready(engine::GradientSink& sink, const at::Tensor&) override {
    const auto reducer = reducer_.lock();
    if (!reducer) return;
    try {
      reducer->gradient_ready(sink, slot_);
    } catch (const std::exception& error) {
      reducer->note_reason(error.what());
      throw;
    }
  }

 private:
  const std::weak_ptr<Impl> reducer_;
  const std::size_t slot_;
};

Reducer::Impl::Impl(Runtime& runtime, Replicas replicas, const collective::Group& group,
                    DataParallelOptions options)
    : runtime_(runtime),
      replicas_(trainable(replicas)),
      count_(replicas_[0].size()),
      options_(std::move(options)),
      group_(group.split(0, group.rank())),
      tracks_use_(options_.find_unused_parameters || options_.static_graph) {
  for (const Parameter& parameter : replicas[0]) {
    if (parameter.tensor.requires_grad()) continue;
    frozen_.push_back(parameter.tensor);
    frozen_names_.push_back(parameter.name);
  }
  for (std::size_t slot = 0; slot < slots(); ++slot)
    slot_of_.emplace(tensor(slot).unsafeGetTensorImpl(), slot);
  fired_locally_.resize(slots());
  used_.resize(count_);
  firings_.resize(slots());
  fired_last_.resize(slots());
  status_ = group_.allocate({static_cast<std::int64_t>(kStatusUsed + (tracks_use_ ? count_ : 0))}, at::kInt);
  std::vector<std::size_t> order(count_);
  std::iota(order.rbegin(), order.rend(), 0U);
  buckets_ = make_buckets(order);
  note_buckets();
}

Reducer::Impl::~Impl() = default;

std::unique_ptr<Buckets> Reducer::Impl::make_buckets(const std::vector<std::size_t>& order) const {
  std::vector<at::Tensor> tensors;
  AssignmentOptions assignment{.order = order};
  for (const Parameter& parameter : replicas_[0]) {
    tensors.push_back(parameter.tensor);
    assignment.sparse.push_back(parameter.sparse_gradient);
  }
  return std::make_unique<Buckets>(
      replicas_, compute_bucket_assignment_by_size(tensors, limits_of(options_), assignment), group_);
}

void Reducer::Impl::note_buckets() {
  MutexLock lock(mutex_);
  stats_.bucket_bytes.clear();
  stats_.bucket_parameters.clear();
  for (std::size_t bucket = 0; bucket < buckets_->size(); ++bucket) {
    stats_.bucket_bytes.push_back(buckets_->bytes(bucket));
    stats_.bucket_parameters.emplace_back();
    for (const std::size_t parameter : buckets_->parameters(bucket))
      stats_.bucket_parameters.back().push_back(name(parameter));
  }
}

void Reducer::Impl::attach() {
  hooked_.resize(slots());
  for (std::size_t slot = 0; slot < slots(); ++slot) hook_slot(slot);
}

void Reducer::Impl::hook_slot(std::size_t slot) {
  for (const engine::GradientHook* other : engine::gradient_hooks(tensor(slot))) {
    if (other->use() == engine::GradientUse::kSteps)
      throw Error(ErrorKind::kInvalid, fmt::format("parameter '{}' {}", name(slot), kStepped));
    if (other->use() == engine::GradientUse::kAverages) passes_->unite(other->passes());
  }
  auto node = torch::autograd::impl::grad_accumulator(tensor(slot));
  const auto key = node->add_post_hook(std::make_unique<SlotHook>(shared_from_this(), slot));
  hooked_[slot] = {std::move(node), key};
}

void Reducer::Impl::attach_again() {
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    auto& [node, key] = hooked_[slot];
    if (torch::autograd::impl::try_get_grad_accumulator(tensor(slot)) == node) continue;
    if (!buckets_->fits(slot)) continue;  // the next backward pass names it
    node->del_post_hook(key);
    hook_slot(slot);
  }
}

bool Reducer::Impl::is_reducing() const {
  MutexLock lock(mutex_);
  return round_ && round_->sink != nullptr;
}

bool Reducer::Impl::is_shared(std::size_t slot) const {
  if (slot >= hooked_.size() || hooked_[slot].first->post_hooks().size() < 2) return false;
  bool shared = false;
  for (const auto& hook : hooked_[slot].first->post_hooks()) {
    const auto* other = dynamic_cast<const SlotHook*>(hook.get());
    const auto reducer = other == nullptr ? nullptr : other->reducer();
    if (!reducer || reducer.get() == this) continue;
    shared = true;
    if (!reducer->is_reducing() || reducer->group_.ranks() == group_.ranks()) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' is averaged by two wrappers, over ranks {} and over ranks {}, in "
                    "one backward pass; wrap it once, or let each pass go through one of them",
                    name(slot), fmt::join(group_.ranks(), ", "), fmt::join(reducer->group_.ranks(), ", ")));
  }
  return shared;
}

void Reducer::Impl::note_reason(const std::string& text) {
  MutexLock lock(mutex_);
  if (round_ && round_->reason.empty()) round_->reason = text;
}

void Reducer::Impl::detach() {
  for (const auto& [node, key] : hooked_) {
    if (node) node->del_post_hook(key);  // none where hooking was refused half-way
  }
  hooked_.clear();
  RoundPtr round;
  {
    MutexLock lock(mutex_);
    round = round_;
  }
  if (round) give_up(round, "the reducer was destroyed in the middle of a reduction");
  settle();
  await_holds();
}

std::shared_ptr<Reducer::Impl> Reducer::Impl::hold() {
  {
    MutexLock lock(mutex_);
    ++holds_;
  }
  return {this, [](Impl* self) {
            MutexLock lock(self->mutex_);
            if (--self->holds_ == 0 && self->awaits_holds_ != nullptr) self->awaits_holds_->unpark();
          }};
}

void Reducer::Impl::await_holds() {
  const auto parker = runtime_.executor.make_parker();
  for (;;) {
    {
      MutexLock lock(mutex_);
      awaits_holds_ = holds_ > 0 ? parker.get() : nullptr;
      if (holds_ == 0) return;
    }
    parker->park(Deadline::never());
  }
}

void Reducer::Impl::begin_forward() {
  if (c10::GradMode::is_enabled()) {
    settle();
    refuse_dropped_forward();
  }
  MutexLock lock(mutex_);
  forward_began_ = runtime_.executor.now();
}

std::vector<std::size_t> Reducer::Impl::unused_slots(const std::vector<at::Tensor>& outputs) const {
  std::vector<bool> reached(slots());
  for (const at::Tensor& leaf : engine::leaf_tensors(outputs)) {
    const auto found = slot_of_.find(leaf.unsafeGetTensorImpl());
    if (found != slot_of_.end()) reached[found->second] = true;
  }
  std::vector<std::size_t> unused;
  for (std::size_t slot = 0; slot < slots(); ++slot) {
    if (!reached[slot]) unused.push_back(slot);
  }
  return unused;
}

void Reducer::Impl::settle() {
  Future<void> given_up, ending;
  {
    MutexLock lock(mutex_);
    given_up = given_up_;
    // Its pass may have failed for the program already, by a worker that was lost, say.
    if (round_ && round_->concluded) ending = round_->over->future();
  }
  if (ending.valid()) ending.wait();
  if (!given_up.valid()) return;
  try {
    given_up.wait();
  } catch (const Error&) {  // it was reported when it happened; a broken group says so at the next operation
  }
  MutexLock lock(mutex_);
  given_up_ = {};
}

void Reducer::Impl::refuse_dropped_forward() {
  std::shared_ptr<ForwardRecord> dropped;
  {
    MutexLock lock(mutex_);
    dropped = std::exchange(dropped_, nullptr);
  }
  if (!dropped) return;
  announce(dropped);
  refuse({.divisor = dropped->divisor, .leader = dropped->leader},
         "an exception took the outputs of its forward before backward had come through them");
  settle();
}

void Reducer::Impl::forget_forwards() {
  for (const auto& weak : outstanding_) {
    if (const auto record = weak.lock()) record->told = true;
  }
  dropped_.reset();
}

void Reducer::Impl::restart_count() {
  MutexLock lock(mutex_);
  forwards_ = 0;
  forget_forwards();
}

void Reducer::Impl::refuse_unfinished_round() {
  RoundPtr round;
  {
    MutexLock lock(mutex_);
    if (!round_ || round_->concluded || round_->sink != nullptr) return;
    round = round_;
  }
  const std::string text = "the backward passes of the previous forward left parameters without gradients: " +
                           missing_text(missing(round)) + "; finish them before the next forward";
  give_up(round, text);
  settle();
  throw Error(ErrorKind::kInvalid, text);
}

void Reducer::Impl::refuse_thawed_parameters() const {
  for (std::size_t i = 0; i < frozen_.size(); ++i) {
    if (!frozen_[i].requires_grad()) continue;
    throw Error(
        ErrorKind::kInvalid,
        fmt::format("parameter '{}' required no gradient when it was wrapped, and does now; wrap the module "
                    "again to have it reduced",
                    frozen_names_[i]));
  }
}

std::vector<at::Tensor> Reducer::Impl::prepare(std::vector<at::Tensor> outputs,
                                               const ForwardOptions& options) {
  if (!c10::GradMode::is_enabled()) return outputs;
  settle();
  if (options.synchronize) refuse_unfinished_round();
  refuse_thawed_parameters();
  attach_again();
  auto record = std::make_shared<ForwardRecord>();
  record->synchronize = options.synchronize;
  record->divisor = options.divisor > 0 ? options.divisor : group_.size();
  record->leader = options.leader;
  record->awaited = options.awaited;
  record->announce = options.announce;
  const bool walk = options_.find_unused_parameters && !options_.static_graph;
  if (walk) record->unused = unused_slots(outputs);
  outputs = mark_outputs(std::move(outputs), record,
                         {.listener = weak_from_this(),
                          .passes = passes_,
                          .together = options_.find_unused_parameters && !options_.partial_backward});
  MutexLock lock(mutex_);
  std::erase_if(outstanding_, [](const auto& other) { return other.expired(); });
  outstanding_.push_back(record);
  if (options.synchronize) {
    ++stats_.forwards;
    forwards_ = (forwards_ + 1) % kForwardsEnd;
    if (const auto began = std::exchange(forward_began_, std::nullopt)) {
      stats_.forward = runtime_.executor.now() - *began;
      runtime_.spans.record(SpanKind::kBucket, "forward", *began, stats_.forwards);
    }
  }
  return outputs;
}

void Reducer::Impl::register_comm_hook(CommHook hook, const std::string& name) {
  settle();
  Agreement mine;
  {
    MutexLock lock(mutex_);
    if (!hook) {
      mine.failure = "the communication hook is empty";
    } else if (hook_) {
      mine.failure = "a communication hook is set already; there is one for the life of the wrapper";
    } else if (rounds_ > 0) {
      mine.failure = "a communication hook must be set before the first backward pass";
    }
  }
  mine.settings = {{"the communication hook", "'" + name + "'"}};
  agree(group_, mine);
  hook_ = std::move(hook);
}

ReducerStats Reducer::Impl::stats() const {
  MutexLock lock(mutex_);
  return stats_;
}

std::uint64_t Reducer::Impl::rounds() const {
  MutexLock lock(mutex_);
  return rounds_;
}

Reducer::Reducer(Runtime& runtime, std::vector<Parameter> parameters, collective::Group group,
                 DataParallelOptions options)
    : Reducer(runtime, Replicas{std::move(parameters)}, std::move(group), std::move(options)) {}

Reducer::Reducer(Runtime& runtime, Replicas replicas, collective::Group group, DataParallelOptions options) {
  agree(group, make_agreement(replicas, options, group));
  Agreement built;  // a rank that has no memory for its buckets must not be waited for in the first step
  try {
    impl_ = std::make_shared<Impl>(runtime, std::move(replicas), group, std::move(options));
    impl_->attach();
  } catch (...) {
    built.failure = describe(std::current_exception()).text;
  }
  try {
    agree(group, built);
  } catch (...) {
    if (impl_) impl_->detach();
    throw;
  }
}

Reducer::~Reducer() { impl_->detach(); }

void Reducer::begin_forward() { impl_->begin_forward(); }
std::vector<at::Tensor> Reducer::prepare_for_backward(std::vector<at::Tensor> outputs,
                                                      ForwardOptions options) {
  return impl_->prepare(std::move(outputs), options);
}
void Reducer::register_comm_hook(CommHook hook, std::string name) {
  impl_->register_comm_hook(std::move(hook), name);
}
void Reducer::shadow(ForwardOptions options) { impl_->shadow(options); }
void Reducer::refuse(ForwardOptions options, const std::string& reason) { impl_->refuse(options, reason); }
void Reducer::restart_count() { impl_->restart_count(); }
void Reducer::settle() { impl_->settle(); }
std::uint64_t Reducer::rounds() const { return impl_->rounds(); }
ReducerStats Reducer::stats() const { return impl_->stats(); }
const collective::Group& Reducer::group() const { return impl_->group(); }

}  // namespace torchspan::data_parallel
