#include "data_parallel/round.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <fmt/format.h>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <torchspan/core/error.h>

#include "data_parallel/advice.h"
#include "data_parallel/streams.h"

namespace torchspan::data_parallel {
namespace {

// The status is the maximum over ranks of: 1 + the rank that gave up, the number of forwards, its negative, and for each
// parameter whether it is used.
constexpr std::size_t kGaveUp = 0, kForwards = 1, kMinusForwards = 2, kUsed = 3;
static_assert(kUsed == kStatusFields);
/// Less than every count and its negative, so a maximum ignores it.
constexpr std::int32_t kNoCount = std::numeric_limits<std::int32_t>::min();
/// Longest reason that is sent to the other ranks.
constexpr std::int64_t kReasonBytes = 512;

double divisor_of(const RoundTerms& terms, const collective::Group& group) {
  return terms.divisor > 0 ? terms.divisor : group.size();
}

/// The error of ranks whose counts of forwards differ; `counts` has those of all ranks.
Error different_counts(const at::Tensor& counts, const std::vector<int>& ranks) {
  const auto* count = counts.data_ptr<std::int32_t>();
  std::size_t fewest = ranks.size(), most = ranks.size();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (count[rank] == kNoCount) continue;
    if (fewest == ranks.size() || count[rank] < count[fewest]) fewest = rank;
    if (most == ranks.size() || count[rank] > count[most]) most = rank;
  }
  return {
      ErrorKind::kInvalid,
      fmt::format("the ranks reduce gradients of different steps: rank {} has run {} reduced forwards "
                  "and rank {} has run {}, so the gradients of this step are invalid on all ranks. A "
                  "rank is ahead after a forward without a backward: an exception or a `continue` between "
                  "the two, or an evaluation without torch::NoGradGuard. The next forward counts as "
                  "the same one on all ranks",
                  ranks[most], count[most], ranks[fewest], count[fewest])};
}

}  // namespace

/// The end of a round after its last launch: waits for the buckets, exchanges the status, and finishes with the averages in
/// the buckets or with the same failure on all ranks. After a failed round the ranks' counts of forwards agree again. After
/// the first successful round it also rebuilds the buckets in the order of gradients. Runs on threads of the group; its
/// continuations keep the round alive.
class Round::Conclusion {
 public:
  /// What this rank reports; the round's pass may fail meanwhile.
  struct Report {
    bool gave_up = false;   ///< its backward pass failed, or it has none
    bool has_pass = false;  ///< its gradients are part of the average
    std::string reason = {};
    std::int32_t forwards = kNoCount;       ///< how many reduced forwards it has run
    std::vector<std::uint8_t> used = {};    ///< by parameter: its gradients are defined
    std::vector<std::uint32_t> order = {};  ///< parameters as their gradients arrived
  };
  Conclusion(Round& round, Report report)
      : round_(round),
        context_(round.context_),
        gradients_(round.gradients_),
        report_(std::move(report)),
        promise_(send_early()),
        reduced_(promise_.future()) {}

  void start() { status_.valid() ? await_status() : await_hooks(0); }
  const Future<void>& reduced() const { return reduced_; }
  /// By parameter: whether any rank used it; empty: all are. After a success.
  const std::vector<std::uint8_t>& used() const { return used_; }
  /// The buckets to use from the next round on, once; null if they stay.
  std::shared_ptr<Buckets> take_rebuilt() { return std::move(rebuilt_); }

 private:
  using Received = std::function<void(const Future<at::Tensor>&)>;
  /// Calls `next` when the future is complete; until then, the round and, longer, the reducer's context exist.
  void then(const Future<at::Tensor>& future, Received next) {
    future.add_done_callback([hold = context_.holds.take(), round = round_.shared_from_this(),
                              next = std::move(next)](const Future<at::Tensor>& done) { next(done); });
  }

  std::weak_ptr<ContinuationExecutor> send_early();
  void await_hooks(std::size_t bucket);
  void send_status();
  void await_status();
  void finish();
  void fail_together();
  void count_reduction();
  void rebuild();
  void build_together(const at::Tensor& order);
  std::exception_ptr placed(std::exception_ptr failure) const;

  std::int32_t status(std::size_t field) const { return context_.status.data_ptr<std::int32_t>()[field]; }
  /// The highest rank that gave up; -1 if none did.
  int failed_rank() const { return status(kGaveUp) - 1; }
  bool counts_differ() const {
    return status(kForwards) != kNoCount && status(kForwards) != -status(kMinusForwards);
  }

  Round& round_;
  ReducerContext& context_;
  RoundGradients& gradients_;
  Report report_;
  Future<at::Tensor> status_;
  std::exception_ptr hook_failure_;
  Promise<void> promise_;
  const Future<void> reduced_;
  std::vector<std::uint8_t> used_;
  std::shared_ptr<Buckets> rebuilt_;
};

/// Without a hook, or with one whose futures are complete, the status follows the buckets at once. Returns
/// the executor of the future that the outcome depends on.
std::weak_ptr<ContinuationExecutor> Round::Conclusion::send_early() {
  std::weak_ptr<ContinuationExecutor> continuations = gradients_.hook_continuations();
  if (!continuations.expired()) return continuations;
  send_status();
  return status_.continuations();
}

/// Waits for one bucket after the other: the status follows everything that hooks send.
void Round::Conclusion::await_hooks(std::size_t bucket) {
  if (bucket < gradients_.works().size())
    return then(gradients_.works()[bucket], [this, bucket](const auto&) { await_hooks(bucket + 1); });
  send_status();
  await_status();
}

void Round::Conclusion::await_status() {
  then(status_, [this](const auto&) { finish(); });
}

/// A failure to send is a failed future, so that it reaches whatever waits for the round.
void Round::Conclusion::send_status() {
  try {
    gradients_.check_hook_results();
  } catch (...) {
    hook_failure_ = std::current_exception();
    if (!report_.gave_up) report_.reason = describe(hook_failure_).text;
  }
  const collective::Group& group = context_.group;
  auto* status = context_.status.data_ptr<std::int32_t>();
  status[kGaveUp] = report_.gave_up || hook_failure_ ? group.rank() + 1 : 0;
  status[kForwards] = report_.forwards;
  status[kMinusForwards] = report_.forwards == kNoCount ? kNoCount : -report_.forwards;
  std::copy(report_.used.begin(), report_.used.end(), status + kUsed);
  try {
    status_ = group.all_reduce(context_.status, collective::kMax);
  } catch (...) {
    status_ = make_failed_future<at::Tensor>(std::current_exception());
  }
}

void Round::Conclusion::finish() {
  try {
    const at::NoGradGuard no_grad;
    status_.wait();
    if (failed_rank() >= 0 || counts_differ()) return fail_together();
    for (std::size_t parameter = 0; parameter < report_.used.size(); ++parameter)
      used_.push_back(status(kUsed + parameter) != 0 ? 1 : 0);
    gradients_.take_results();
    count_reduction();
    const DataParallelOptions& options = context_.options;
    if (!context_.keeps_buckets && options.rebuild_buckets &&
        (options.static_graph || !options.find_unused_parameters)) {
      return rebuild();
    }
    promise_.set_value_behind(gradients_.gate());
  } catch (...) {
    promise_.set_error(placed(std::current_exception()));
  }
}

/// Collective: finds the ranks with the most and the fewest forwards, or broadcasts why a rank gave up.
void Round::Conclusion::fail_together() {
  const collective::Group& group = context_.group;
  {
    ForwardPtr dropped;
    MutexLock lock(context_.mutex);
    if (status(kForwards) != kNoCount) context_.forward_count = status(kForwards);
    dropped = context_.forwards.forget();
    if (!report_.gave_up) ++context_.stats.aborted;
  }
  const auto fail = [this](std::exception_ptr error) {
    promise_.set_error(hook_failure_ ? hook_failure_ : std::move(error));
  };
  const int failed = failed_rank();
  if (failed < 0) {
    const at::Tensor counts = at::full({group.size()}, kNoCount, at::kInt);
    counts[group.rank()] = report_.forwards;
    return then(group.all_reduce(counts, collective::kMax), [&group, counts, fail](const auto& received) {
      fail(received.error() ? received.error()
                            : std::make_exception_ptr(different_counts(counts, group.ranks())));
    });
  }
  const at::Tensor text = at::zeros({kReasonBytes}, at::kByte);
  if (failed == group.rank()) {
    const auto size = std::min<std::size_t>(report_.reason.size(), kReasonBytes - 1);
    std::memcpy(text.data_ptr(), report_.reason.data(), size);
  }
  then(group.broadcast(text, failed), [fail, text, rank = group.ranks()[failed]](const auto& received) {
    if (received.error()) return fail(received.error());
    fail(std::make_exception_ptr(
        Error(ErrorKind::kRemoteFailure,
              fmt::format("rank {} gave up its backward pass, so the gradients of this step are invalid on "
                          "all ranks: {}",
                          rank, static_cast<const char*>(text.data_ptr())))
            .with_worker(fmt::format("rank {}", rank))));
  });
}

void Round::Conclusion::count_reduction() {
  std::vector<std::string> names;
  const bool is_whole = report_.order.size() == context_.slots.count() || round_.delayed_;
  if (is_whole) {
    for (const std::uint32_t parameter : report_.order) names.push_back(context_.slots.name(parameter));
  }
  {
    MutexLock lock(context_.mutex);
    ++context_.stats.reductions;
    if (is_whole) context_.stats.gradient_order = std::move(names);
  }
  if (report_.has_pass) gradients_.note_times();
}

/// Collective: all ranks get buckets in the order in which gradients arrived on one rank, or none does.
void Round::Conclusion::rebuild() {
  const std::size_t count = context_.slots.count();
  const at::Tensor order = at::empty({static_cast<std::int64_t>(count)}, at::kLong);
  std::vector<bool> placed(count);
  auto* next = order.data_ptr<std::int64_t>();
  for (const std::uint32_t parameter : report_.order) {
    placed[parameter] = true;
    *next++ = parameter;
  }
  for (std::size_t parameter = count; parameter-- > 0;) {
    if (!placed[parameter]) *next++ = static_cast<std::int64_t>(parameter);
  }
  then(context_.group.broadcast(order, round_.terms_.leader), [this, order](const auto& agreed) {
    try {
      agreed.wait();
      build_together(order);
    } catch (...) {
      promise_.set_error(std::current_exception());
    }
  });
}

/// A rank may have no memory for new buckets beside the old ones: then all ranks keep the old ones.
void Round::Conclusion::build_together(const at::Tensor& order) {
  const at::NoGradGuard no_grad;
  const StreamScope on_pass(round_.pass_stream_);
  const collective::Group& group = context_.group;
  std::string reason;
  try {
    const auto* first = order.data_ptr<std::int64_t>();
    rebuilt_ = build_buckets(context_.slots.replicas(), context_.options, group,
                             std::vector<std::size_t>(first, first + order.numel()));
  } catch (...) {
    reason = describe(std::current_exception()).text;
  }
  const at::Tensor failed = at::full({1}, rebuilt_ ? 0 : group.rank() + 1, at::kInt);
  then(group.all_reduce(failed, collective::kMax), [this, &group, failed, reason](const auto& agreed) {
    try {
      agreed.wait();
      if (const int unbuilt = *failed.data_ptr<std::int32_t>(); unbuilt > 0) {
        rebuilt_.reset();
        context_.runtime.log.warning(fmt::format(
            "gradient buckets keep the order of parameters, because rank {} cannot allocate new ones next to "
            "them{}; training continues, with less overlap of communication and backward. Give the group "
            "more memory, or set rebuild_buckets to false",
            group.ranks()[static_cast<std::size_t>(unbuilt - 1)], reason.empty() ? "" : ": " + reason));
      }
      context_.keeps_buckets = true;
      promise_.set_value_behind(gradients_.gate());
    } catch (...) {
      promise_.set_error(std::current_exception());
    }
  });
}

/// A failure of the group, with the bucket that it hit and with advice.
std::exception_ptr Round::Conclusion::placed(std::exception_ptr failure) const {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    std::string where = gradients_.failed_bucket();
    if (where.empty() && status_.done() && status_.error()) where = "the status exchange";
    if (where.empty()) return failure;
    const Error located(error.kind(),
                        fmt::format("in reduction {}, {}: {}", gradients_.round(), where, error.message()));
    return std::make_exception_ptr(
        with_advice(Error(located).with_worker(error.worker()).with_call(error.call())));
  } catch (...) {
    return failure;
  }
}

Round::Round(ReducerContext& context, const RoundTerms& terms, bool delayed)
    : context_(context),
      terms_(terms),
      delayed_(delayed),
      gradients_(context, ++context.rounds, divisor_of(terms, context.group), /*in_place=*/false) {}

Round::Round(ReducerContext& context, const ForwardPtr& record, engine::GradientSink& sink, bool delayed)
    : context_(context),
      terms_(record->terms),
      delayed_(delayed),
      pass_stream_(context.stream.current()),
      gradients_(context, ++context.rounds, divisor_of(record->terms, context.group),
                 context.options.gradient_as_bucket_view && sink.writes_grad_field()),
      records_({record}),
      sink_(&sink),
      end_(sink.end()) {}

Round::~Round() = default;

bool Round::enter(engine::GradientSink& sink, const ForwardPtr& record) {
  MutexLock lock(context_.mutex);
  if (std::find(records_.begin(), records_.end(), record) == records_.end()) records_.push_back(record);
  if (end_ == sink.end()) return false;
  if (conclusion_ || sink_ != nullptr) {
    throw_invalid(
        "a second backward pass goes through this module while another one is running; run one after the "
        "other");
  }
  sink_ = &sink;
  end_ = sink.end();
  return true;
}

bool Round::reduces(const ForwardPtr& record) const {
  MutexLock lock(context_.mutex);
  return std::find(records_.begin(), records_.end(), record) != records_.end();
}

bool Round::all_passed() const {
  MutexLock lock(context_.mutex);
  return std::all_of(records_.begin(), records_.end(),
                     [](const ForwardPtr& record) { return record->all_passed(); });
}

void Round::defer_unused(bool all) {
  MutexLock lock(context_.mutex);
  (all ? all_deferred_ : deferred_) = true;
}

bool Round::defers_unused() const {
  MutexLock lock(context_.mutex);
  return deferred_ || all_deferred_;
}

std::vector<std::size_t> Round::unreached() const {
  const bool last = all_passed();
  std::vector<std::size_t> counts(context_.slots.size()), slots;
  MutexLock lock(context_.mutex);
  if (all_deferred_ && last) {
    slots.resize(counts.size());
    std::iota(slots.begin(), slots.end(), std::size_t{0});
    return slots;
  }
  for (const ForwardPtr& record : records_) {
    for (const std::size_t slot : record->unused) ++counts[slot];
  }
  for (std::size_t slot = 0; slot < counts.size(); ++slot) {
    if (counts[slot] == records_.size()) slots.push_back(slot);
  }
  return slots;
}

void Round::pause() {
  MutexLock lock(context_.mutex);
  sink_ = nullptr;
}

engine::GradientSink* Round::sink() const {
  MutexLock lock(context_.mutex);
  return sink_;
}

void Round::note_reason(const std::string& reason) {
  MutexLock lock(context_.mutex);
  if (reason_.empty()) reason_ = reason;
}

std::string Round::reason() const {
  MutexLock lock(context_.mutex);
  return reason_;
}

bool Round::give_up(const std::string& reason) {
  {
    ForwardPtr dropped;
    MutexLock lock(context_.mutex);
    if (concluding_ || std::exchange(given_up_, true)) return false;
    abandoned_ = std::exchange(sink_, nullptr);
    if (reason_.empty()) reason_ = reason;
    ++context_.stats.aborted;
    dropped = context_.forwards.forget();
  }
  gradients_.stop();
  return true;
}

void Round::conclude_with_zeros(bool runs_forwards) {
  engine::GradientSink* abandoned = nullptr;
  {
    MutexLock lock(context_.mutex);
    abandoned = std::exchange(abandoned_, nullptr);
    runs_forwards_ = runs_forwards;
  }
  try {
    const PassStreamScope on_pass(pass_stream_, context_.stream.events());
    if (abandoned != nullptr) gradients_.leave_buckets(*abandoned);
  } catch (...) {  // the other ranks' reduction would write to gradients
    gradients_.set_broken();
  }
  if (gradients_.is_broken()) throw Error(ErrorKind::kCancelled, reason());
  gradients_.launch_zeros();
  conclude();
}

void Round::conclude() {
  Conclusion::Report report;
  std::shared_ptr<engine::PassEnd> end;
  {
    MutexLock lock(context_.mutex);
    if (std::exchange(concluding_, true)) return;
    report.gave_up = given_up_;
    report.has_pass = sink_ != nullptr;
    report.reason = reason_;
    if (runs_forwards_) report.forwards = context_.forward_count;
    report.used.resize(context_.used.size());
    if (report.has_pass) report.used.swap(context_.used);
    if (report.gave_up) std::fill(context_.used.begin(), context_.used.end(), 0);
    if (sink_ != nullptr) end = end_;
  }
  report.order = gradients_.order();
  gradients_.end_backward();
  auto made = std::make_unique<Conclusion>(*this, std::move(report));
  Conclusion& conclusion = *made;
  {
    MutexLock lock(context_.mutex);
    conclusion_ = std::move(made);
    written_back_.emplace(conclusion.reduced().continuations());
  }
  if (end) end->hold(conclusion.reduced());
  conclusion.start();
}

bool Round::is_open() const {
  MutexLock lock(context_.mutex);
  return !given_up_ && !concluding_ && sink_ != nullptr;
}

bool Round::is_given_up() const {
  MutexLock lock(context_.mutex);
  return given_up_;
}

bool Round::is_concluded() const {
  MutexLock lock(context_.mutex);
  return conclusion_ != nullptr;
}

Future<void> Round::reduced() const {
  MutexLock lock(context_.mutex);
  return conclusion_->reduced();
}

Future<void> Round::written_back() const {
  MutexLock lock(context_.mutex);
  return written_back_->future();
}

void Round::set_written_back() {
  Promise<void>* promise = nullptr;
  {
    MutexLock lock(context_.mutex);
    promise = &*written_back_;
  }
  promise->set_value();
}

void Round::finish_pass() {
  const Future<void> outcome = reduced();
  if (!outcome.done() || outcome.error()) return context_.restore_undefined();
  std::vector<std::uint8_t> used;
  {
    MutexLock lock(context_.mutex);
    static_cast<void>(context_.undefined.take());
    used = conclusion_->used();
  }
  const PassStreamScope on_pass(pass_stream_, context_.stream.events());
  outcome.wait();  // orders the stream after the reductions
  gradients_.write_back(*sink(), used);
  install_rebuilt();
}

void Round::install_rebuilt() {
  std::shared_ptr<Buckets> rebuilt;
  {
    MutexLock lock(context_.mutex);
    rebuilt = conclusion_->take_rebuilt();
  }
  if (!rebuilt) return;
  context_.buckets = rebuilt;
  context_.note_buckets();
  if (engine::GradientSink* target = sink()) gradients_.move_to(*rebuilt, *target);
  MutexLock lock(context_.mutex);
  context_.stats.rebuilt = true;
}

}  // namespace torchspan::data_parallel
