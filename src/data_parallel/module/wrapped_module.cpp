#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <optional>
#include <set>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <torchspan/core/error.h>
#include <torchspan/data_parallel/sync_batch_norm.h>
#include <torchspan/detail/data_parallel/wrapped_module.h>

#include "core/api/throw_invalid.h"
#include "data_parallel/advice.h"
#include "data_parallel/api/agreement.h"
#include "data_parallel/api/group_ranks.h"
#include "data_parallel/module/broadcast.h"
#include "state/api/place.h"

namespace torchspan::data_parallel {

/// The parameters and buffers that a module has in common with the other ranks: in the module's order, each
/// tensor once under its first name, without ignored ones.
struct ModuleParts {
  std::vector<Parameter> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};

namespace {

using Names = std::set<std::string>;

/// Names of the weights of embeddings with the option sparse(true).
Names sparse_embeddings(const torch::nn::Module& module) {
  Names names;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const auto note = [&](const auto* embedding) {
      if (embedding && embedding->options.sparse())
        names.insert(item.key().empty() ? "weight" : item.key() + ".weight");
    };
    note(dynamic_cast<const torch::nn::EmbeddingImpl*>(item.value().get()));
    note(dynamic_cast<const torch::nn::EmbeddingBagImpl*>(item.value().get()));
  }
  return names;
}

/// Parameters whose gradients are sparse. The sum of the gradients of a sparse embedding and of another module that
/// shares its weight is dense, so such a weight is not one of them unless the options name it.
std::set<const c10::TensorImpl*> sparse_parameters(const torch::nn::Module& module,
                                                   const std::vector<std::string>& chosen) {
  const Names embeddings = sparse_embeddings(module);
  std::set<const c10::TensorImpl*> sparse, dense;
  for (const auto& item : module.named_parameters()) {
    if (!item.value().defined()) continue;
    const auto* impl = item.value().unsafeGetTensorImpl();
    embeddings.count(item.key()) > 0 ? sparse.insert(impl) : dense.insert(impl);
  }
  for (const auto* impl : dense) sparse.erase(impl);
  for (const auto& item : module.named_parameters()) {
    if (std::find(chosen.begin(), chosen.end(), item.key()) != chosen.end() && item.value().defined())
      sparse.insert(item.value().unsafeGetTensorImpl());
  }
  return sparse;
}

void refuse_unknown(const Names& known, const std::vector<std::string>& names, const char* option) {
  for (const std::string& name : names) {
    if (known.count(name) > 0) continue;
    throw_invalid("{} has '{}', but the module has no parameter or buffer of that name", option, name);
  }
}

/// Throws Error{kInvalid} for a name in the options that the module does not have.
ModuleParts parts_of(const torch::nn::Module& module, const DataParallelOptions& options) {
  const std::set<const c10::TensorImpl*> sparse = sparse_parameters(module, options.sparse_parameters);
  const Names ignored(options.ignored_parameters.begin(), options.ignored_parameters.end());
  Names known;
  std::set<const c10::TensorImpl*> seen;
  ModuleParts parts;
  for (const auto& item : module.named_parameters()) {
    known.insert(item.key());
    if (ignored.count(item.key()) > 0 || !item.value().defined()) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    const bool is_sparse = sparse.count(item.value().unsafeGetTensorImpl()) > 0;
    parts.parameters.push_back({item.key(), item.value(), is_sparse});
  }
  for (const auto& item : module.named_buffers()) {
    known.insert(item.key());
    if (ignored.count(item.key()) > 0 || !item.value().defined()) continue;
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      parts.buffers.emplace_back(item.key(), item.value());
  }
  refuse_unknown(known, options.ignored_parameters, "ignored_parameters");
  refuse_unknown(known, options.sparse_parameters, "sparse_parameters");
  return parts;
}

/// Gives places to what each rank keeps for itself: ignored parameters and buffers, and all buffers without
/// broadcast_buffers. What an earlier wrapper left to each rank, and this one does not, is whole again.
void mark_own(const torch::nn::Module& module, const DataParallelOptions& options,
              const state::RanksPtr& ranks) {
  const Names ignored(options.ignored_parameters.begin(), options.ignored_parameters.end());
  const auto mark = [&](const at::Tensor& tensor, bool own) {
    if (!tensor.defined()) return;
    const state::PlacePtr before = state::place_of(tensor);
    if (!own && (!before || !before->own)) return;
    state::Place place = before ? *before : state::Place();
    if (place.own) place.among.erase(place.among.begin());  // of an earlier wrapper
    if (own) place.among.insert(place.among.begin(), ranks);
    place.own = own;
    state::set_place(tensor, std::move(place));
  };
  for (const auto& item : module.named_parameters()) mark(item.value(), ignored.contains(item.key()));
  for (const auto& item : module.named_buffers())
    mark(item.value(), !options.broadcast_buffers || ignored.contains(item.key()));
}

/// What the ranks of a join() do next, as they agreed before a forward or a reduction.
struct JoinRound {
  std::vector<bool> live;    ///< by rank: it has a batch
  bool synchronize = false;  ///< the forward will be reduced
  bool reduces = false;      ///< a reduction of earlier forwards follows, not a forward

  int live_count() const;
  int first_live() const;
  int last_live() const;
};

/// One rank's part of that agreement.
struct JoinState {
  bool live = false;
  bool synchronize = false;
  bool reduces = false;
  std::string failure = {};  ///< why the loop ended with an exception
};

constexpr int kLive = 1, kSynchronize = 2, kFailed = 4, kReduces = 8;
constexpr std::int64_t kFailureBytes = 512;

int encode(const JoinState& state) {
  return (state.live ? kLive : 0) | (state.synchronize ? kSynchronize : 0) |
         (state.failure.empty() ? 0 : kFailed) | (state.reduces ? kReduces : 0);
}

/// Collective: broadcasts the failure of one rank, and throws it on ranks that did not fail.
void broadcast_failure(const collective::Group& group, int failed, const JoinState& mine) {
  at::Tensor text = at::zeros({kFailureBytes}, at::kByte);
  if (failed == group.rank()) {
    const auto size = std::min<std::size_t>(mine.failure.size(), kFailureBytes - 1);
    std::memcpy(text.data_ptr(), mine.failure.data(), size);
  }
  group.broadcast(text, failed).wait();
  if (!mine.failure.empty()) return;
  const int rank = group.ranks()[static_cast<std::size_t>(failed)];
  throw Error(ErrorKind::kRemoteFailure,
              fmt::format("the training loop of rank {} inside join() ended with an exception: {}", rank,
                          static_cast<const char*>(text.data_ptr())))
      .with_worker(fmt::format("rank {}", rank));
}

/// Throws if one live rank sets `bit` and another does not.
void refuse_difference(const collective::Group& group, const std::int32_t* words, int bit, const char* what) {
  int with = -1, without = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    if ((words[rank] & kLive) != 0) ((words[rank] & bit) != 0 ? with : without) = rank;
  }
  if (with < 0 || without < 0) return;
  throw_invalid(fmt::runtime(what), group.ranks()[static_cast<std::size_t>(with)],
                group.ranks()[static_cast<std::size_t>(without)]);
}

int JoinRound::live_count() const { return static_cast<int>(std::count(live.begin(), live.end(), true)); }
int JoinRound::first_live() const {
  return static_cast<int>(std::find(live.begin(), live.end(), true) - live.begin());
}
int JoinRound::last_live() const {
  return static_cast<int>(live.rend() - std::find(live.rbegin(), live.rend(), true)) - 1;
}

/// Collective over the ranks of a join(). Throws Error{kRemoteFailure} that names a rank whose loop threw, and
/// why, on the other ranks; Error{kInvalid} that names two ranks if live ranks disagree about what follows.
JoinRound agree_on_next_round(const collective::Group& group, const JoinState& mine) {
  at::Tensor words = group.allocate({group.size()}, at::kInt);
  words.zero_();
  words.data_ptr<std::int32_t>()[group.rank()] = encode(mine);
  group.all_reduce(words, collective::kMax).wait();
  const auto* word = words.data_ptr<std::int32_t>();
  JoinRound round;
  int failed = -1;
  for (int rank = 0; rank < group.size(); ++rank) {
    round.live.push_back((word[rank] & kLive) != 0);
    if ((word[rank] & kFailed) != 0) failed = rank;
    if (!round.live.back()) continue;
    round.synchronize = round.synchronize || (word[rank] & kSynchronize) != 0;
    round.reduces = round.reduces || (word[rank] & kReduces) != 0;
  }
  if (failed >= 0) {
    broadcast_failure(group, failed, mine);
    return round;
  }
  refuse_difference(
      group, word, kReduces,
      "rank {} begins a reduction and rank {} begins a forward: inside join() all ranks that have "
      "batches must run the same forwards and backwards in the same order");
  refuse_difference(
      group, word, kSynchronize,
      "rank {} reduces this forward and rank {} runs it under no_sync(): inside join() all ranks "
      "that have batches must do the same");
  return round;
}

/// Collective: the module's parts; throws on all ranks if they differ.
ModuleParts agreed_parts(const std::shared_ptr<torch::nn::Module>& module, const collective::Group& group,
                         const DataParallelOptions& options) {
  Agreement mine;
  ModuleParts parts;
  try {
    if (!module) throw_invalid("the module is null");
    parts = parts_of(*module, options);
    for (const auto& [name, buffer] : parts.buffers) {
      check_device(group, name, buffer);
      mine.add(name, buffer);
    }
  } catch (const Error& error) {
    mine.failure = error.message();
  }
  std::string ignored;
  for (const std::string& name : options.ignored_parameters) ignored += " '" + name + "'";
  mine.settings = {{"ignored_parameters", "[" + ignored + " ]"}};
  data_parallel::agree(group, mine);
  return parts;
}

std::vector<Parameter> trained_of(const ModuleParts& parts) {
  std::vector<Parameter> trained = parts.parameters;
  std::erase_if(trained, [](const Parameter& parameter) { return !parameter.tensor.requires_grad(); });
  return trained;
}

std::vector<at::Tensor> buffers_of(const ModuleParts& parts) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, buffer] : parts.buffers) tensors.push_back(buffer);
  return tensors;
}

}  // namespace

class WrappedModule::Impl {
 public:
  Impl(const std::shared_ptr<torch::nn::Module>& module, const collective::Group& group,
       const DataParallelOptions& options)
      : options_(options),
        module_(module),
        parts_(agreed_parts(module, group, options)),
        buffers_(buffers_of(parts_)),
        reducer_(parts_.parameters, group, options) {
    if (options_.initial_sync) synchronize_state(0);
    mark_own(*module, options_, ranks_of(group, state::kDataParallel, [joins = joins_] {
      if (!*joins) return;
      throw_invalid(
          "inside join(), clip_grad_norm() and GradScaler do not take parameters of "
          "DataParallelOptions::ignored_parameters: ranks without batches cannot take part in the norm or "
          "the decision; clip and scale the other parameters only");
    }));
  }

  const collective::Group& group() const { return reducer_.group(); }

  void begin_forward() {
    in_forward_ = false;
    owes_ = {};
    if (optimizer_hooks_.before_forward) optimizer_hooks_.before_forward();
    if (join_ && joining_.failure && at::GradMode::is_enabled()) std::rethrow_exception(joining_.failure);
    if (join_ && at::GradMode::is_enabled() && optimizer_hooks_.before_round) optimizer_hooks_.before_round();
    reducer_.begin_forward();
    next_ = {.synchronize = synchronize()};
    if (!at::GradMode::is_enabled()) return;
    if (join_) {
      apply(agree_on_next({.live = true, .synchronize = synchronize()}));
      next_.announce = [this] { return announce(); };
    }
    in_forward_ = owes_.buffer_hook = synchronize();
    if (synchronize()) ++begun_;
    owes_.buffers = synchronize() && options_.broadcast_buffers && !buffer_hook_;
    await_buffers();
    share_buffers();
    if (buffer_hook_ && synchronize() && buffer_hook_time_ == BufferHookTime::kBeforeForward) {
      call_buffer_hook();
      await_buffers();
    }
  }

  std::vector<at::Tensor> end_forward(std::vector<at::Tensor> outputs) {
    if (buffer_hook_ && buffer_hook_time_ == BufferHookTime::kAfterForward && next_.synchronize &&
        at::GradMode::is_enabled()) {
      call_buffer_hook();
      next_.awaited = pending_buffers_;
    }
    outputs = reducer_.prepare_for_backward(std::move(outputs), next_);
    in_forward_ = false;
    return outputs;
  }

  /// The other ranks continue and wait for this rank in their backward passes.
  void forward_failed() {
    if (!std::exchange(in_forward_, false)) return;
    const std::string reason = "its forward threw: " + describe(std::current_exception()).text;
    try {
      share_buffers();
      if (buffer_hook_) call_buffer_hook();
      if (join_) {
        next_.terms = announce();
      }
      reducer_.fail_next_round(next_.terms, reason);
    } catch (...) {                           // the caller rethrows the exception of the forward
      if (join_ && joining_.failure) return;  // that one has reached all ranks
      group().abort(Error(ErrorKind::kCancelled,
                          fmt::format("rank {} could not report that {}", group().ranks()[rank()], reason)));
    }
  }

  void set_buffer_hook(BufferHook hook, const std::string& name, BufferHookTime when) {
    reducer_.settle();
    Agreement mine;
    if (!hook) {
      mine.failure = "the buffer hook is empty";
    } else if (buffer_hook_) {
      mine.failure = "a buffer hook is already set; it cannot be replaced";
    } else if (!options_.broadcast_buffers) {
      mine.failure = "broadcast_buffers is false, so a buffer hook would never be called";
    }
    const bool before = when == BufferHookTime::kBeforeForward;
    mine.settings = {{"the buffer hook", "'" + name + "'"},
                     {"the time of the buffer hook", before ? "before forward" : "after forward"}};
    data_parallel::agree(group(), mine);
    buffer_hook_ = std::move(hook);
    buffer_hook_time_ = when;
  }

  bool agree(bool ok) {
    if (join_) {
      throw_invalid(
          "agree() was called inside join(): a rank without batches cannot take part in it; let the "
          "exception end the join");
    }
    std::vector<std::function<void()>> arrivals;
    const auto join_forward = [&] {
      next_ = {};
      if (options_.broadcast_buffers && !buffer_hook_)
        arrivals.push_back(begin_broadcast(group(), buffers_, next_.terms.leader));
      owes_.buffer_hook = buffer_hook_ != nullptr;
      if (buffer_hook_) call_buffer_hook();
    };
    const bool all = reducer_.agree(ok, {.count = std::exchange(begun_, 0), .join = join_forward});
    for (const auto& arrival : arrivals) arrival();
    return all;
  }

  void synchronize_state(int root) {
    if (optimizer_hooks_.before_broadcast) optimizer_hooks_.before_broadcast();
    reducer_.settle();
    await_buffers();
    std::vector<at::Tensor> tensors = buffers_;
    for (const Parameter& parameter : parts_.parameters) tensors.push_back(parameter.tensor);
    broadcast_coalesced(group(), tensors, root);
  }

  void join(const std::function<void()>& body, const JoinOptions& options) {
    if (join_) throw_invalid("join() was called inside join(); end the outer one first");
    if (buffer_hook_) {
      throw_invalid("join() does not support a buffer hook: a rank without batches cannot take part in it");
    }
    if (!options.throw_on_early_termination) refuse_sync_batch_norms();
    join_ = options;
    *joins_ = true;
    joining_.failure = nullptr;
    joining_.last_live = 0;
    struct Leave {
      Impl& self;
      ~Leave() {
        self.join_.reset();
        *self.joins_ = false;
        self.joining_.without_batches = 0;
        self.reducer_.restart_count();
      }
    } leave{*this};
    try {
      body();
      if (joining_.failure) std::rethrow_exception(joining_.failure);  // the body has caught it
      reducer_.settle();
      if (optimizer_hooks_.body_ended) optimizer_hooks_.body_ended();
      shadow_other_ranks();
    } catch (...) {
      if (!joining_.failure) report_failure(describe(std::current_exception()).text);
      throw;
    }
    synchronize_state(joining_.last_live);
  }

  std::size_t pauses_ = 0;  ///< of reductions
  bool synchronize() const { return pauses_ == 0; }
  /// What join() keeps between its rounds.
  struct Joining {
    std::exception_ptr failure;  ///< known to all ranks
    int last_live = 0;
    int without_batches = 0;  ///< ranks in the last reduction
  } joining_;
  OptimizerHooks optimizer_hooks_;
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  const Reducer& reducer() const { return reducer_; }
  Reducer& reducer() { return reducer_; }
  std::vector<Parameter> trained() const { return trained_of(parts_); }

 private:
  /// A SyncBatchNorm waits for all ranks during a forward.
  void refuse_sync_batch_norms() const {
    for (const auto& item : module_->named_modules()) {
      const auto* norm = dynamic_cast<const SyncBatchNormImpl*>(item.value().get());
      if (norm == nullptr || !norm->group() || norm->group()->size() == 1) continue;
      throw_invalid(
          "join() does not support '{}', a SyncBatchNorm, which needs the batches of all ranks; set "
          "throw_on_early_termination",
          item.key());
    }
  }

  std::size_t rank() const { return static_cast<std::size_t>(group().rank()); }

  void share_buffers() {
    if (!std::exchange(owes_.buffers, false)) return;
    try {
      broadcast_coalesced(group(), buffers_, next_.terms.leader);
    } catch (const Error& error) {
      throw with_advice(error);
    }
  }

  void call_buffer_hook() {
    if (!std::exchange(owes_.buffer_hook, false) || parts_.buffers.empty()) return;
    rounds_before_hook_ = reducer_.rounds();
    std::vector<NamedBuffer> seen;
    for (const auto& [name, buffer] : parts_.buffers) seen.push_back({name, buffer.variable_data()});
    std::vector<Future<at::Tensor>> answers;
    try {
      answers = buffer_hook_(seen, group());
    } catch (...) {  // other ranks may be waiting inside the hook
      group().abort(Error(ErrorKind::kCancelled,
                          fmt::format("the buffer hook of rank {} threw: {}", group().ranks()[rank()],
                                      describe(std::current_exception()).text)));
      throw;
    }
    for (const Future<at::Tensor>& future : answers) {
      if (!future.valid()) throw_invalid("the buffer hook returned an empty future");
      pending_buffers_.push_back(future.then([](const Future<at::Tensor>& done) { done.wait(); }));
    }
  }
  /// Throws a failure unless a backward pass has thrown it.
  void await_buffers() {
    const bool thrown = reducer_.rounds() != rounds_before_hook_;
    for (const Future<void>& future : std::exchange(pending_buffers_, {})) {
      try {
        future.wait();
      } catch (...) {
        if (!thrown) throw;
      }
    }
  }

  /// Exchanges `mine` with the other ranks. A failure is the same on all ranks and ends the join on all.
  JoinRound agree_on_next(const JoinState& mine) {
    reducer_.settle();
    try {
      return agree_on_next_round(group(), mine);
    } catch (...) {
      joining_.failure = std::current_exception();
      throw;
    }
  }

  /// Applies what the ranks agreed on to the forward or reduction that follows.
  void apply(const JoinRound& round) {
    joining_.last_live = round.last_live();
    next_.synchronize = round.synchronize;
    next_.terms.leader = round.first_live();
    next_.terms.divisor = join_->divide_by_initial_world_size ? group().size() : round.live_count();
    if (!join_->throw_on_early_termination || round.live_count() == group().size()) return;
    for (int rank = 0; rank < group().size(); ++rank) {
      if (round.live[static_cast<std::size_t>(rank)]) continue;
      const Error ended(ErrorKind::kCancelled,
                        fmt::format("rank {} has run out of batches, and throw_on_early_termination is set",
                                    group().ranks()[static_cast<std::size_t>(rank)]));
      joining_.failure = std::make_exception_ptr(ended);
      throw Error(ended);
    }
  }

  /// A reduction begins on this rank: notifies ranks without batches that they take part.
  RoundTerms announce() {
    if (!join_) {
      throw_invalid(
          "a backward pass over the outputs of a forward inside join() runs after join() returned; run both "
          "inside");
    }
    if (joining_.failure) std::rethrow_exception(joining_.failure);
    if (optimizer_hooks_.before_round) optimizer_hooks_.before_round();
    const JoinRound round = agree_on_next({.live = true, .synchronize = true, .reduces = true});
    apply(round);
    joining_.without_batches = group().size() - round.live_count();
    return next_.terms;
  }

  void shadow_other_ranks() {
    for (;;) {
      const JoinRound round = agree_on_next({});
      if (round.live_count() == 0) return;
      apply(round);
      if (round.reduces) {
        shadow_reduction();
      } else if (round.synchronize && options_.broadcast_buffers) {
        broadcast_coalesced(group(), buffers_, next_.terms.leader);
      }
    }
  }

  void shadow_reduction() {
    bool reduced = true;
    try {
      reducer_.join_with_zeros(next_.terms);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kRemoteFailure) throw;
      reduced = false;  // on the ranks that have batches, too; these decide whether they continue
    }
    if (optimizer_hooks_.after_shadow) optimizer_hooks_.after_shadow(reduced);
  }

  /// The other ranks receive it at their next forward or reduction.
  void report_failure(const std::string& reason) {
    try {
      reducer_.settle();      // body_failed depends on whether the last reduction succeeded
    } catch (const Error&) {  // the next operation of a broken group fails, too
    }
    if (optimizer_hooks_.body_failed) optimizer_hooks_.body_failed(reason);
    try {
      agree_on_next_round(group(), {.failure = reason.empty() ? "without a text" : reason});
    } catch (const Error&) {  // join() rethrows the exception of the body
    }
  }

  const DataParallelOptions options_;
  const std::shared_ptr<torch::nn::Module> module_;
  const ModuleParts parts_;
  const std::vector<at::Tensor> buffers_;
  Reducer reducer_;
  BufferHook buffer_hook_;
  BufferHookTime buffer_hook_time_ = BufferHookTime::kAfterForward;
  std::vector<Future<void>> pending_buffers_;
  std::uint64_t rounds_before_hook_ = 0;
  ForwardOptions next_;
  bool in_forward_ = false;  ///< of a forward that will be reduced
  std::int64_t begun_ = 0;   ///< such forwards since the last agree()
  struct Owes {
    bool buffers = false, buffer_hook = false;
  } owes_;
  std::optional<JoinOptions> join_;
  const std::shared_ptr<bool> joins_ = std::make_shared<bool>(false);  ///< for places, which may outlive this
};

WrappedModule::WrappedModule(std::shared_ptr<torch::nn::Module> module, collective::Group group,
                             DataParallelOptions options)
    : impl_(std::make_unique<Impl>(module, group, options)) {}
WrappedModule::~WrappedModule() = default;

void WrappedModule::begin_forward() { impl_->begin_forward(); }
std::vector<at::Tensor> WrappedModule::end_forward(std::vector<at::Tensor> outputs) {
  return impl_->end_forward(std::move(outputs));
}
void WrappedModule::forward_failed() noexcept { impl_->forward_failed(); }
void WrappedModule::pause_reductions() { ++impl_->pauses_; }
void WrappedModule::resume_reductions() { --impl_->pauses_; }
void WrappedModule::register_comm_hook(CommHook hook, std::string name) {
  impl_->reducer().register_comm_hook(std::move(hook), std::move(name));
}
void WrappedModule::set_buffer_hook(BufferHook hook, std::string name, BufferHookTime when) {
  impl_->set_buffer_hook(std::move(hook), name, when);
}
void WrappedModule::join(const std::function<void()>& body, const JoinOptions& options) {
  impl_->join(body, options);
}
bool WrappedModule::agree(bool ok) { return impl_->agree(ok); }
void WrappedModule::synchronize_state(int root) { impl_->synchronize_state(root); }
const std::shared_ptr<torch::nn::Module>& WrappedModule::module() const { return impl_->module(); }
const Reducer& WrappedModule::reducer() const { return impl_->reducer(); }
std::vector<Parameter> WrappedModule::parameters() const { return impl_->trained(); }
void WrappedModule::keep_buckets() { impl_->reducer().keep_buckets(); }
void WrappedModule::set_optimizer_hooks(OptimizerHooks hooks) { impl_->optimizer_hooks_ = std::move(hooks); }
int WrappedModule::ranks_without_batches() const { return impl_->joining_.without_batches; }

}  // namespace torchspan::data_parallel
