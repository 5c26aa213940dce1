#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <limits>
#include <set>

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/nn/module.h>

#include <torchspan/detail/pipeline/extension.h>
#include <torchspan/pipeline.h>
#include <torchspan/pipeline/deferred_batch_norm.h>

#include "core/api/throw_invalid.h"
#include "pipeline/layers/micro_batches.h"
#include "pipeline/policies/tables.h"
#include "pipeline/runtime/agreement.h"
#include "pipeline/runtime/cache_state.h"
#include "pipeline/runtime/handshake.h"
#include "pipeline/runtime/overlap.h"
#include "pipeline/runtime/step.h"
#include "state/api/gradient_norm.h"
#include "state/api/place.h"
#include "state/api/save_load.h"

namespace torchspan::pipeline {
namespace {

/// The workers of a pipeline, each of which has other layers.
class PipelineRanks final : public state::Ranks {
 public:
  explicit PipelineRanks(const LocalPipeline& local)
      : worker_(local.worker),
        workers_(local.plan.workers),
        me_(local.me),
        timeout_(local.options.stall_timeout),
        while_waiting_(local.options.while_waiting) {}

  const std::string& identity() const override { return identity_; }
  int level() const override { return state::kPipeline; }
  int rank() const override { return me_; }

  void reduce(std::vector<double>& numbers, bool maximum) const override {
    Bytes bytes(numbers.size() * sizeof(double));
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    std::fill(numbers.begin(), numbers.end(), 0.0);
    for (const Bytes& other : all_gather_bytes(worker_, bytes, workers_, timeout_, while_waiting_)) {
      std::vector<double> theirs(numbers.size());
      std::memcpy(theirs.data(), other.data(), std::min(other.size(), bytes.size()));
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const bool largest = maximum && !std::isnan(theirs[i]) && !std::isnan(numbers[i]);
        numbers[i] = largest ? std::max(numbers[i], theirs[i]) : numbers[i] + theirs[i];
      }
    }
  }

 private:
  const Worker worker_;
  const std::vector<std::string> workers_;
  const int me_;
  const Duration timeout_;
  const WhileWaiting while_waiting_;
  const std::string identity_ = fmt::format("workers {}", fmt::join(workers_, "\n"));
};

/// Whether another copy of a tied parameter counts instead of this one.
bool counts_elsewhere(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (std::size_t copy = 0; copy < tie.copies.size(); ++copy) {
      if (tie.copies[copy].is_same(parameter)) return copy > 0 || tie.workers.front() != local.me;
    }
  }
  return false;
}

/// The first copy of the same tied parameter on this worker; undefined for that one, and for other parameters.
at::Tensor first_copy_here(const LocalPipeline& local, const at::Tensor& parameter) {
  for (const Tie& tie : local.ties) {
    for (std::size_t copy = 1; copy < tie.copies.size(); ++copy) {
      if (tie.copies[copy].is_same(parameter)) return tie.copies.front();
    }
  }
  return {};
}

/// Gives the parameters of this worker's layers places among the workers of the pipeline, while it lives. Copies of a tied
/// parameter on other workers than the first one are repeated. Other pipelines may have the same parameters.
class PipelinePlaces {
 public:
  PipelinePlaces(const LocalPipeline& local, const std::vector<at::Tensor>& parameters)
      : local_(local), ranks_(std::make_shared<PipelineRanks>(local)) {
    for (const at::Tensor& parameter : parameters) {
      const state::PlacePtr before = state::place_of(parameter);
      parameters_.push_back({parameter, before && before->repeated, before ? before->same_as : at::Tensor()});
      state::Place place = place_among(parameter);
      if (before) place.among = before->among;
      place.among.push_back(ranks_);
      state::set_place(parameter, std::move(place));
    }
  }
  ~PipelinePlaces() {
    for (const auto& [parameter, repeated, same_as] : parameters_) {
      const state::PlacePtr now = state::place_of(parameter);
      if (!now) continue;
      state::Place place = *now;
      const auto is_of_pipeline = [](const state::RanksPtr& one) { return one->level() == state::kPipeline; };
      const bool was_last = !place.among.empty() && place.among.back() == ranks_;
      std::erase(place.among, ranks_);
      const bool is_in_another = std::ranges::any_of(place.among, is_of_pipeline);
      if (was_last || !is_in_another) {  // the ties of the last pipeline count
        place.repeated = is_in_another && repeated;
        place.same_as = is_in_another ? same_as : at::Tensor();
      }
      state::set_place(parameter, std::move(place));
    }
  }
  PipelinePlaces(const PipelinePlaces&) = delete;
  PipelinePlaces& operator=(const PipelinePlaces&) = delete;

  /// The gradients of the parameters, at their places in this pipeline; at least one place, so that a worker without
  /// parameters takes part.
  std::vector<state::PlacedGradient> gradients() const {
    std::vector<state::PlacedGradient> all;
    for (const Placed& one : parameters_) {
      state::Place place = place_among(one.tensor);
      place.among.push_back(ranks_);
      all.push_back({one.tensor.grad(), std::make_shared<state::Place>(std::move(place))});
    }
    if (all.empty()) all.push_back({{}, std::make_shared<state::Place>(state::Place{.among = {ranks_}})});
    return all;
  }

 private:
  /// Without the ranks of any pipeline.
  state::Place place_among(const at::Tensor& parameter) const {
    const state::PlacePtr now = state::place_of(parameter);
    state::Place place = now ? *now : state::Place();
    place.repeated = counts_elsewhere(local_, parameter);
    place.same_as = first_copy_here(local_, parameter);
    std::erase_if(place.among, [](const state::RanksPtr& one) { return one->level() == state::kPipeline; });
    return place;
  }

  /// A parameter, and the ties that it had in an earlier pipeline.
  struct Placed {
    at::Tensor tensor;
    bool repeated;
    at::Tensor same_as;
  };

  const LocalPipeline& local_;
  const state::RanksPtr ranks_;
  std::vector<Placed> parameters_;
};

/// Of the steps without gradients in seed_of_use().
constexpr std::uint64_t kFirstOtherStep = std::uint64_t{1} << 63;

/// Notifies the workers of a step that it will not end.
void post_abandoned(const LocalPipeline& local, std::uint64_t step, const char* why) {
  local.post_to_all(local.grid.all_ranks(),
                    StepFailed{{local.id, step},
                               Error(ErrorKind::kCancelled,
                                     fmt::format("step {} of pipeline '{}' was abandoned on worker '{}': {}",
                                                 step, local.options.name, local.worker.name(), why))
                                   .with_worker(local.worker.name())});
}

}  // namespace

Cache::Cache() : state_(std::make_unique<State>()) {}
Cache::~Cache() = default;

void Cache::State::belong_to(std::uint64_t pipeline, std::int64_t& next_number) {
  if (pipeline_ && *pipeline_ != pipeline)
    throw_invalid("this Cache belongs to another pipeline, which used it first; make one for each pipeline");
  if (pipeline_) return;
  pipeline_ = pipeline;
  number_ = next_number++;
}

void Cache::State::check_rows(const std::vector<std::int64_t>& rows) const {
  if (rows_.empty() || rows == rows_) return;
  throw_invalid(
      "the calls with one Cache have different rows: micro-batches of [{}] rows before, of [{}] now; pass as "
      "many rows as in the first call, or use a new Cache",
      fmt::join(rows_, ", "), fmt::join(rows, ", "));
}

void Cache::State::commit(CacheTensors tensors, std::vector<std::int64_t> rows) {
  tensors_ = std::move(tensors);
  rows_ = std::move(rows);
}

class Pipeline::Impl {
 public:
  Impl(const Worker& worker, const Layers& layers, PipelineOptions options)
      : local_(make_local(worker, layers, std::move(options))),
        tables_(local_),
        overlapped_(local_, parameters()),
        places_(local_, parameters()) {
    tables_.check();
    if (local_.options.offload) offloader_.emplace();
  }
  ~Impl();

  double train(const Batch& input, const Batch& target, const Loss* loss, const StepOptions& options);
  double train_overlapped(const Batch& input, const Batch& target, const Loss* loss,
                          const StepOptions& options);
  double end_overlapped();
  Batch infer(const Batch& input, Cache* cache);
  Batch forward(const Batch& input);
  void backward(std::vector<at::Tensor> gradients);

  void train_mode(bool on) {
    for (const BuiltLayer& layer : local_.layers) {
      if (layer.module) layer.module->train(on);
    }
  }
  std::vector<at::Tensor> parameters() const;

  const LocalPipeline& local() const { return local_; }
  const StepReport& last_step() const { return report_; }
  std::optional<std::uint64_t> in_flight() const { return overlapped_.in_flight(); }
  std::uint64_t training_steps() const { return training_steps_; }
  void set_training_steps(std::uint64_t steps) { training_steps_ = steps; }
  double clip(double max_norm, double norm_type);

 private:
  template <class Body>
  auto in_step(StepKind kind, const Batch& input, const Batch& target, const Loss* loss,
               const StepOptions& options, const Body& body);
  template <class Body>
  auto guarded(const Body& body);
  std::uint64_t next_random_step(StepKind kind);
  StepWork prepare(StepKind kind, const Batch& input, const Batch& target, const Loss* loss,
                   const StepOptions& options);
  StepBegin begin_first(StepKind kind, const Batch& input, const StepOptions& options);
  StepBegin await_begin(StepKind kind);
  void end_step(bool succeeded);
  void abandon(const char* why);
  bool is_first() const { return local_.me == local_.first_worker(); }
  bool is_last() const { return local_.me == local_.last_worker(); }

  LocalPipeline local_;
  Tables tables_;
  std::uint64_t next_step_ = 0;
  std::uint64_t training_steps_ =
      0;  ///< that have succeeded, also in earlier pipelines whose state this one has
  std::uint64_t other_steps_ = 0;  ///< without gradients, on the first worker
  bool carries_ = false;           ///< `.grad` has gradients of steps with no_sync
  std::int64_t next_cache_ = 0;
  Cache::State* cache_ = nullptr;  ///< of the call to infer() that runs
  std::optional<device::Offloader> offloader_;
  std::unique_ptr<Step> step_;  ///< also between forward() and backward()
  std::array<Loss, 2> losses_;  ///< of overlapping steps, which refer to them; by step modulo 2
  OverlappedSteps overlapped_;
  PipelinePlaces places_;
  Batch output_;
  StepReport report_;
};

Pipeline::Impl::~Impl() {
  abandon("the pipeline was destroyed before its backward()");
  if (const auto step = overlapped_.in_flight())
    post_abandoned(local_, *step, "the pipeline was destroyed before finish()");
}

/// Forgets the cache of a call at its end.
struct CacheScope {
  Cache::State*& place;
  ~CacheScope() { place = nullptr; }
};

/// Runs a part of a step. Reports a failure of this worker to the others, and ends the step.
template <class Body>
auto Pipeline::Impl::guarded(const Body& body) {
  const std::uint64_t step = next_step_ - 1;
  try {
    return body();
  } catch (const EndedElsewhere& error) {
    end_step(false);
    throw Error(error);
  } catch (...) {
    Error error = to_error(std::current_exception());
    local_.report_failure(step, error);
    end_step(false);
    throw error;
  }
}

template <class Body>
auto Pipeline::Impl::in_step(StepKind kind, const Batch& input, const Batch& target, const Loss* loss,
                             const StepOptions& options, const Body& body) {
  if (overlapped_.in_flight()) {
    throw_invalid(
        "step {} of pipeline '{}' is in flight (PipelineOptions::staleness is 1): call finish() on all "
        "workers before infer() or forward()",
        *overlapped_.in_flight(), local_.options.name);
  }
  abandon("its worker began another step without calling backward()");
  ++next_step_;
  return guarded([&] {
    step_ = std::make_unique<Step>(local_, prepare(kind, input, target, loss, options));
    auto result = body(*step_);
    if (kind != StepKind::kForward) end_step(true);
    return result;
  });
}

StepWork Pipeline::Impl::prepare(StepKind kind, const Batch& input, const Batch& target, const Loss* loss,
                                 const StepOptions& options) {
  local_.set_state(next_step_ - 1, true, false, "");
  if (cache_ != nullptr) cache_->belong_to(local_.id, next_cache_);
  local_.check_presence(next_step_ - 1);
  StepWork work;
  work.begin = is_first() ? begin_first(kind, input, options) : await_begin(kind);
  work.begin.carries = carries_;
  if (is_first()) work.input = input;
  if (is_last() && loss != nullptr) {
    work.loss = loss;
    work.target = target;
    const std::int64_t rows = total_rows(work.begin.rows);
    const std::int64_t there = count_rows(target, "target");
    if (there != rows) {
      throw_invalid(
          "the target has {} rows, the input {}: worker '{}' and worker '{}' got different batches; pass "
          "both the same batch",
          there, rows, local_.worker.name(),
          local_.plan.workers[static_cast<std::size_t>(local_.first_worker())]);
    }
  }
  work.before_first_backward = options.before_first_backward;
  work.cache = cache_;
  work.offloader = offloader_ ? &*offloader_ : nullptr;
  work.table = tables_.find(work.begin.kind, static_cast<int>(work.begin.rows.size()));
  return work;
}

StepBegin Pipeline::Impl::begin_first(StepKind kind, const Batch& input, const StepOptions& options) {
  StepBegin begin;
  begin.id = {local_.id, next_step_ - 1};
  begin.kind = kind;
  begin.rows = split_rows(count_rows(input, "input"), local_.options.micro_batches);
  begin.gradient_scale = options.gradient_scale;
  begin.random_step = next_random_step(kind);
  begin.no_sync = options.no_sync && local_.grid.count() > 1;
  if (cache_ != nullptr) {
    cache_->check_rows(begin.rows);
    begin.cache = cache_->number();
  }
  begin.arrived = local_.executor().now();
  local_.post_to_all(local_.ranks(), begin);
  announce_to_replicas(local_, begin);
  return begin;
}

/// Steps without gradients have numbers of their own, so that an evaluation does not change the training.
std::uint64_t Pipeline::Impl::next_random_step(StepKind kind) {
  if (!has_backwards(kind)) return kFirstOtherStep + other_steps_++;
  return training_steps_ + (overlapped_.trains() ? 1 : 0);
}

StepBegin Pipeline::Impl::await_begin(StepKind kind) {
  const std::uint64_t step = next_step_ - 1;
  StallWatch watch(local_);
  for (;;) {
    std::deque<StepEvent> events = local_.event_queue->take(overlapped_.in_flight().value_or(step), step);
    std::optional<StepBegin> begin;
    try {
      for (const StepEvent& event : events) {
        local_.throw_failure(step, event);
        const auto* found = std::get_if<StepBegin>(&event);
        if (found != nullptr && found->id.step == step) begin = *found;
      }
    } catch (...) {
      // The step before, if it is in flight, must see the failure, too.
      local_.event_queue->put_back(std::move(events));
      throw;
    }
    // The step takes the events that arrived with it or before it.
    local_.event_queue->put_back(std::move(events));
    if (begin) {
      const bool training = kind == StepKind::kTrain || kind == StepKind::kLoss;
      const bool begun_training = begin->kind == StepKind::kTrain || begin->kind == StepKind::kLoss;
      if (training != begun_training || (!training && kind != begin->kind)) {
        throw_invalid(
            "the workers of pipeline '{}' call different functions in step {}: {} on worker '{}', {} on "
            "worker '{}'; call the same one on all",
            local_.options.name, step, call_of(begin->kind),
            local_.plan.workers[static_cast<std::size_t>(local_.first_worker())], call_of(kind),
            local_.worker.name());
      }
      if (begin->cache != (cache_ == nullptr ? -1 : cache_->number())) {
        throw_invalid(
            "worker '{}' and worker '{}' pass different caches to infer() of pipeline '{}' in step {}; pass "
            "the same one on all workers",
            local_.plan.workers[static_cast<std::size_t>(local_.first_worker())], local_.worker.name(),
            local_.options.name, step);
      }
      return *begin;
    }
    if (local_.event_queue->wait(watch.patience())) continue;
    if (const auto stall = watch.check(step, "the step to begin")) throw *stall;
  }
}

void Pipeline::Impl::end_step(bool succeeded) {
  if (succeeded) {
    if (has_backwards(step_->begin().kind)) {
      carries_ = step_->begin().no_sync;
      ++training_steps_;
    }
    report_ = step_->report();
    Log& log = local_.worker.runtime().log;
    if (log.enabled(LogLevel::kDebug)) {
      log.debug(fmt::format("pipeline '{}': step {}, {} micro-batches in {:.1f} ms", local_.options.name,
                            report_.step, report_.micro_batches,
                            std::chrono::duration<double, std::milli>(report_.measured.makespan).count()));
    }
  }
  step_.reset();
  output_ = Batch();
  for (const BuiltLayer& layer : local_.layers) {
    if (!layer.module) continue;
    for (const auto& module : layer.module->modules()) {
      if (auto* statistics = dynamic_cast<StepStatistics*>(module.get())) statistics->end_step(succeeded);
    }
  }
  local_.set_state(next_step_ - 1, false, false, fmt::format("step {}", next_step_ - 1));
}

/// Abandons a forward() whose backward() was not called, so that the other workers do not wait in it.
void Pipeline::Impl::abandon(const char* why) {
  if (!step_) return;
  post_abandoned(local_, step_->begin().id.step, why);
  end_step(false);
}

double Pipeline::Impl::train(const Batch& input, const Batch& target, const Loss* loss,
                             const StepOptions& options) {
  const StepKind kind = torch::autograd::GradMode::is_enabled() ? StepKind::kTrain : StepKind::kLoss;
  return in_step(kind, input, target, loss, options, [&](Step& step) {
    step.run_part(false);
    step.close();
    return step.loss();
  });
}

double Pipeline::Impl::train_overlapped(const Batch& input, const Batch& target, const Loss* loss,
                                        const StepOptions& options) {
  abandon("its worker began another step without calling backward()");
  const StepKind kind = torch::autograd::GradMode::is_enabled() ? StepKind::kTrain : StepKind::kLoss;
  overlapped_.begin(next_step_++, [&] {
    if (options.before_first_backward.valid() || options.no_sync) {
      throw_invalid("StepOptions::{} cannot be combined with PipelineOptions::staleness 1: leave it out",
                    options.no_sync ? "no_sync" : "before_first_backward");
    }
    Loss& kept = losses_[(next_step_ - 1) % losses_.size()];
    kept = *loss;
    return prepare(kind, input, target, &kept, options);
  });
  return end_overlapped();
}

double Pipeline::Impl::end_overlapped() {
  std::optional<OverlappedSteps::Ended> ended;
  const auto set_idle = [this] {
    if (next_step_ == 0) return;
    local_.set_state(next_step_ - 1, false, false, fmt::format("step {}", next_step_ - 1));
  };
  try {
    ended = overlapped_.end();
  } catch (...) {
    set_idle();
    throw;
  }
  set_idle();
  if (!ended) return std::numeric_limits<double>::quiet_NaN();
  if (ended->trained) ++training_steps_;
  report_ = std::move(ended->report);
  return ended->loss;
}

Batch Pipeline::Impl::infer(const Batch& input, Cache* cache) {
  cache_ = cache == nullptr ? nullptr : &cache->state();
  const CacheScope scope{cache_};
  return in_step(StepKind::kInfer, input, {}, nullptr, {}, [&](Step& step) {
    step.run_part(false);
    // Before the other workers may leave the step: outputs that cannot be joined fail on all of them.
    Batch output = is_last() ? step.output() : Batch();
    step.close();
    step.commit_cache();
    return output;
  });
}

Batch Pipeline::Impl::forward(const Batch& input) {
  output_ = in_step(StepKind::kForward, input, {}, nullptr, {}, [&](Step& step) {
    step.run_part(false);
    Batch output = is_last() ? step.output() : Batch();
    step.await_workers();
    return output;
  });
  return output_;
}

void Pipeline::Impl::backward(std::vector<at::Tensor> gradients) {
  if (!step_) {
    throw_invalid(
        "backward() of pipeline '{}' without a forward() before it, or after one that failed; call forward() "
        "first",
        local_.options.name);
  }
  guarded([&] {
    if (is_last() && gradients.empty()) {
      for (const c10::IValue& member : output_.members) {
        gradients.push_back(member.isTensor() && member.toTensor().defined() ? member.toTensor().grad()
                                                                             : at::Tensor());
      }
    }
    if (is_last() && gradients.size() != output_.members.size()) {
      throw_invalid("backward() got {} gradients for an output of {} members; pass one per member",
                    gradients.size(), output_.members.size());
    }
    step_->put_output_gradients(gradients);
    step_->run_part(true);
    step_->close();
    end_step(true);
  });
}

std::vector<at::Tensor> Pipeline::Impl::parameters() const {
  std::vector<at::Tensor> all;
  std::set<const void*> seen;
  for (const BuiltLayer& layer : local_.layers) {
    if (!layer.module) continue;
    for (const at::Tensor& parameter : layer.module->parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
    }
  }
  return all;
}

double Pipeline::Impl::clip(double max_norm, double norm_type) {
  if (carries_) {
    throw_invalid(
        "clip_grad_norm: the replicas of pipeline '{}' have not exchanged the gradients of steps with "
        "StepOptions::no_sync; clip after a step without it",
        local_.options.name);
  }
  if (!(max_norm > 0)) throw_invalid("clip_grad_norm: max_norm is {}; it must be more than 0", max_norm);
  if (!(norm_type > 0)) throw_invalid("clip_grad_norm: norm_type is {}; it must be more than 0", norm_type);
  return state::clip(places_.gradients(), max_norm, norm_type);
}

Pipeline::Pipeline(const Worker& worker, const Layers& layers, PipelineOptions options)
    : impl_(std::make_unique<Impl>(worker, layers, std::move(options))) {}
Pipeline::~Pipeline() = default;

double Pipeline::train_step(const Batch& input, const Batch& target, const Loss& loss,
                            const StepOptions& options) {
  if (impl_->local().options.staleness > 0) return impl_->train_overlapped(input, target, &loss, options);
  return impl_->train(input, target, &loss, options);
}
double Pipeline::finish() { return impl_->end_overlapped(); }
Batch Pipeline::infer(const Batch& input) { return impl_->infer(input, nullptr); }
Batch Pipeline::infer(const Batch& input, Cache& cache) { return impl_->infer(input, &cache); }
Batch Pipeline::forward(const Batch& input) { return impl_->forward(input); }
void Pipeline::backward(const std::vector<at::Tensor>& gradients) { impl_->backward(gradients); }
void Pipeline::train(bool on) { impl_->train_mode(on); }
std::vector<at::Tensor> Pipeline::parameters() const { return impl_->parameters(); }
double Pipeline::clip_grad_norm(double max_norm, double norm_type) {
  return impl_->clip(max_norm, norm_type);
}
std::shared_ptr<torch::nn::Module> Pipeline::module(int layer) const {
  return impl_->local().layers.at(static_cast<std::size_t>(layer)).module;
}
const Plan& Pipeline::plan() const { return impl_->local().plan; }
int Pipeline::replica() const { return impl_->local().grid.mine; }
const std::vector<std::vector<TiedParameter>>& Pipeline::ties() const { return impl_->local().declared_ties; }
const StepReport& Pipeline::last_step() const { return impl_->last_step(); }
bool Pipeline::in_flight() const { return impl_->in_flight().has_value(); }
std::uint64_t Pipeline::training_steps() const { return impl_->training_steps(); }
void Pipeline::set_training_steps(std::uint64_t steps) { impl_->set_training_steps(steps); }

namespace {

constexpr const char* kTrainingSteps = "training_steps";

/// Nullopt for the checkpoints of earlier releases.
std::optional<std::int64_t> training_steps_in(const state::StateReader& reader) {
  std::optional<state::Value> value;
  try {
    value = reader.value(kTrainingSteps);
  } catch (const Error&) {  // there is no such value
    return std::nullopt;
  }
  return state::value_as<std::int64_t>(*value);
}

std::string layer_prefix(int layer) { return fmt::format("layers.{}", layer); }

/// The parameters and buffers of this worker's layers. The first name of a tied parameter is that of the first copy.
std::vector<state::ModuleTensor> pipeline_tensors(const Pipeline& pipeline) {
  std::vector<state::ModuleTensor> all;
  for (int layer = 0; layer < static_cast<int>(pipeline.plan().layers.size()); ++layer) {
    if (const auto module = pipeline.module(layer))
      state::append_module_tensors(all, *module, layer_prefix(layer));
  }
  for (const auto& tie : pipeline.ties()) {
    const auto name_of = [](const TiedParameter& parameter) {
      return state::join_names(layer_prefix(parameter.layer), parameter.name);
    };
    for (state::ModuleTensor& entry : all) {
      const bool tied = std::any_of(tie.begin(), tie.end(), [&](const TiedParameter& parameter) {
        return std::find(entry.names.begin(), entry.names.end(), name_of(parameter)) != entry.names.end();
      });
      if (tied) entry.names.insert(entry.names.begin(), name_of(tie.front()));
    }
  }
  return all;
}

class PipelineSource final : public state::StateSource {
 public:
  explicit PipelineSource(Pipeline& pipeline) : pipeline_(pipeline) {}

  void save(state::StateWriter& writer) const override {
    require_no_batch("saved");
    std::vector<state::ModuleTensor> once;
    for (state::ModuleTensor& entry : pipeline_tensors(pipeline_)) {
      const bool known = std::any_of(once.begin(), once.end(), [&](const state::ModuleTensor& other) {
        return other.names.front() == entry.names.front();
      });
      if (!known) once.push_back(std::move(entry));
    }
    state::save_module_tensors(writer, once);
    writer.add_value(kTrainingSteps, static_cast<std::int64_t>(pipeline_.training_steps()));
  }
  void load(const state::StateReader& reader) override {
    require_no_batch("restored");
    const std::optional<std::int64_t> steps = training_steps_in(reader);
    state::load_module_tensors(reader, pipeline_tensors(pipeline_), {.allow_unexpected = true});
    if (steps) pipeline_.set_training_steps(static_cast<std::uint64_t>(*steps));
  }
  bool owns_names() const override { return false; }

 private:
  /// The gradients of a batch in flight belong to the parameters with which it began, which nothing else has.
  void require_no_batch(const char* what) const {
    if (!pipeline_.in_flight()) return;
    throw_invalid(
        "a batch of the pipeline is in flight (PipelineOptions::staleness is 1), so the pipeline cannot be "
        "{}: call finish() on all workers and apply its gradients first",
        what);
  }

  Pipeline& pipeline_;
};

}  // namespace

state::SourcePtr Pipeline::state_source() { return std::make_unique<PipelineSource>(*this); }

std::vector<std::string> Pipeline::parameter_names() const {
  const std::vector<state::ModuleTensor> all = pipeline_tensors(*this);
  std::vector<std::string> names;
  for (const at::Tensor& parameter : parameters()) {
    for (const state::ModuleTensor& entry : all) {
      if (!entry.tensor.is_same(parameter)) continue;
      // A second copy on one worker is a parameter with its own state.
      const bool taken = std::find(names.begin(), names.end(), entry.names.front()) != names.end();
      names.push_back(taken ? entry.names.back() : entry.names.front());
    }
  }
  return names;
}

}  // namespace torchspan::pipeline
