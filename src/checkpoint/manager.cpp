#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <unistd.h>
#include <utility>

#include <ATen/core/ivalue.h>

#include <torchspan/checkpoint.h>
#include <torchspan/core/error.h>
#include <torchspan/detail/core/runtime.h>

#include "checkpoint/api/names_and_values.h"
#include "checkpoint/commit/agreement.h"
#include "checkpoint/commit/ranks.h"
#include "checkpoint/commit/rounds.h"
#include "checkpoint/files/directory.h"
#include "checkpoint/files/safetensors.h"
#include "checkpoint/remote_values.h"
#include "checkpoint/state/folder_reader.h"
#include "checkpoint/state/snapshot.h"
#include "core/api/saturated_time.h"
#include "core/api/throw_invalid.h"

namespace torchspan {

using checkpoint::SourcePtr;

class CheckpointManager::Impl {
 public:
  Impl(Runtime& runtime, std::shared_ptr<void> keep, std::unique_ptr<checkpoint::Ranks> ranks,
       std::unique_ptr<checkpoint::Owners> owners, CheckpointOptions options)
      : keep_(std::move(keep)),
        runtime_(runtime),
        options_(std::move(options)),
        owners_(std::move(owners)),
        ranks_(std::move(ranks)),
        directory_(disk_, options_.directory),
        prepared_(directory_, ranks_->names().at(ranks_->index()), runtime_.log),
        agreement_(*ranks_) {
    if (options_.directory.empty()) throw_invalid("CheckpointOptions::directory is empty; name a folder");
    if (options_.keep_last < 1 || options_.keep_best < 0) {
      throw_invalid("keep_last is {} and keep_best {}; at least one checkpoint must be kept",
                    options_.keep_last, options_.keep_best);
    }
    if (options_.rng) add("rng", checkpoint::rng_source(), true);
  }

  ~Impl() {
    if (const auto failure = finish()) runtime_.log.error(failure->message());
  }

  void add(const std::string& name, SourcePtr source, bool per_rank) {
    if (!source) throw_invalid("the state registered as '{}' is null", name);
    for (const Registered& other : sources_) {
      if (other.name == name)
        throw_invalid("'{}' is registered twice; use another name for one of them", name);
      checkpoint::require_separate_names(name, *source, other.name, *other.source);
    }
    const Scope scope = source->is_of_rank() ? Scope::kRank : per_rank ? Scope::kSameRank : Scope::kAll;
    sources_.push_back({name, scope, std::move(source)});
  }

  void save(std::int64_t step, const SaveOptions& options) {
    const std::optional<Error> previous = finish();
    checkpoint::StateWriter writer;
    checkpoint::Listing listing;
    const auto proposal = outcome_of([&] {
      if (previous) throw *previous;
      if (ranks_->commits()) prepared_.before_save();
      for (const Registered& one : sources_) {
        const bool of_rank =
            one.scope == Scope::kSameRank || (one.scope == Scope::kRank && ranks_->size() > 1);
        writer.set_prefix(of_rank ? checkpoint::name_of_rank(one.name, ranks_->index()) : one.name);
        one.source->save(writer);
      }
      listing = checkpoint::listing_of(writer.tensors());
      if (!writer.remote().empty())
        std::ranges::move(owners().list(writer.remote()), std::back_inserter(listing));
      return checkpoint::encode_proposal(
          {step, next_token(), agreement_.digest_of(listing), options.metric, writer.values()});
    });
    checkpoint::SaveJob job = agreement_.agree(proposal, step, listing);
    try {
      take_snapshot(writer, job);
      if (options_.asynchronous) {
        writer_ = runtime_.executor.spawn("checkpoint writer", [this, job]() mutable { write(job); });
        return;
      }
    } catch (...) {
      job.failure = to_error(std::current_exception());
    }
    write(job);                         // lets the other ranks know of a failure: they wait for this one
    if (options_.asynchronous) return;  // the next save() or wait() throws the failure, as on the other ranks
    if (const auto failure = finish()) throw *failure;
  }

  void wait() {
    if (const auto failure = finish()) throw *failure;
  }

  std::optional<std::int64_t> restore() {
    const std::optional<Error> previous = finish();
    if (previous) runtime_.log.warning(previous->message());
    checkpoint::RestoreRound round(*ranks_, directory_, runtime_.log);
    if (ranks_->commits()) prepared_.before_restore();
    return round.run([this](const std::string& folder, const checkpoint::Manifest& manifest) {
      checkpoint::FolderReader reader(folder, manifest);
      reader.set_read_on_owner([this](const std::string& from, const std::string& name, const auto& value) {
        owners().load(from, name, value);
      });
      for (const Registered& one : sources_) {
        reader.set_prefix(saved_name_of(one, reader));
        one.source->load(reader);
      }
      return reader.usage();
    });
  }

 private:
  enum class Scope : std::uint8_t {
    kAll,       ///< replicas and parts of one state
    kRank,      ///< of each rank; that of another rank will do
    kSameRank,  ///< of each rank
  };
  struct Registered {
    std::string name;
    Scope scope = Scope::kAll;
    SourcePtr source;
  };

  /// Under which name a checkpoint has the state for this rank.
  std::string saved_name_of(const Registered& one, checkpoint::FolderReader& reader) const {
    const std::string mine = checkpoint::name_of_rank(one.name, ranks_->index());
    if (one.scope == Scope::kAll) return one.name;
    if (one.scope == Scope::kRank) {
      reader.set_prefix(one.name);
      const std::string found = checkpoint::name_for_rank(reader, ranks_->index());
      if (found != mine && found != one.name) {
        runtime_.log.warning(
            fmt::format("the checkpoint has no '{}': this rank gets a copy of '{}'", mine, found));
      }
      return found;
    }
    const int saved = reader.manifest().world_size;
    if (one.name != "rng" && saved != static_cast<int>(ranks_->size())) {
      throw_invalid("'{}' was saved per rank by {} ranks; {} ranks cannot restore it", one.name, saved,
                    ranks_->size());
    }
    return mine;
  }

  checkpoint::Owners& owners() const {
    if (!owners_) throw_invalid("this CheckpointManager has no session, so it cannot save an RRef");
    return *owners_;
  }

  void take_snapshot(const checkpoint::StateWriter& writer, const checkpoint::SaveJob& job) {
    if (!writer.remote().empty()) owners().snapshot(writer.remote(), job, ranks_->index());
    const checkpoint::Plan::Share* own = job.plan.own_share(ranks_->index());
    if (own == nullptr) return;
    if (options_.asynchronous) {
      snapshot_.copy(writer.tensors(), *own);
    } else {
      snapshot_.borrow(writer.tensors(), *own);
    }
  }

  /// Waits for the writing thread; returns and forgets its failure.
  std::optional<Error> finish() {
    writer_.join();
    snapshot_.release();
    if (owners_) owners_->release();
    if (failure_) prepared_.save_failed();
    return std::exchange(failure_, std::nullopt);
  }

  void write(checkpoint::SaveJob& job) {
    const SpanScope span(runtime_.spans, SpanKind::kCheckpoint, "write checkpoint");
    try {
      const std::vector<BytesView> data = snapshot_data(job);
      checkpoint::SaveRound round(*ranks_, directory_, runtime_.log);
      round.run(job, data, {options_.keep_last, options_.keep_best, options_.lower_is_better},
                [this](const checkpoint::Plan::Share& share, const std::string& path) {
                  return owners().write(share, path);
                });
    } catch (...) {
      failure_ = to_error(std::current_exception());
    }
  }

  /// If the copies have failed, so has the job, and the round lets the other ranks know.
  std::vector<BytesView> snapshot_data(checkpoint::SaveJob& job) {
    if (job.failure) return {};
    try {
      return snapshot_.data();
    } catch (...) {
      job.failure = to_error(std::current_exception());
      return {};
    }
  }

  std::uint64_t next_token() {
    ByteWriter seed;
    seed.put(static_cast<std::int64_t>(runtime_.executor.now().time_since_epoch().count()));
    seed.put(static_cast<std::int64_t>(::getpid()));
    seed.put(++saves_);
    return checkpoint::checksum_of(seed.bytes());
  }

  const std::shared_ptr<void> keep_;  ///< of the runtime
  Runtime& runtime_;
  const CheckpointOptions options_;
  const std::unique_ptr<checkpoint::Owners> owners_;  ///< null without a session
  const std::unique_ptr<checkpoint::Ranks> ranks_;
  const checkpoint::Disk disk_;
  const checkpoint::Directory directory_;
  checkpoint::PreparedDirectory prepared_;  ///< used by the committing rank
  checkpoint::SaveAgreement agreement_;
  std::vector<Registered> sources_;
  checkpoint::Snapshot snapshot_;
  std::uint64_t saves_ = 0;
  std::optional<Error> failure_;  ///< of the last save; written by `writer_`
  Thread writer_;
};

namespace {

std::unique_ptr<checkpoint::Ranks> ranks_of(const Worker& worker, const CheckpointOptions& options) {
  return checkpoint::make_worker_ranks(worker, options.participants, options.name,
                                       no_limit_if_zero(options.timeout));
}

}  // namespace

CheckpointManager::CheckpointManager(const Worker& worker, CheckpointOptions options)
    : impl_(std::make_unique<Impl>(
          worker.runtime(), worker.backend(), ranks_of(worker, options),
          std::make_unique<checkpoint::Owners>(worker, no_limit_if_zero(options.timeout)),
          std::move(options))) {}

CheckpointManager::CheckpointManager(CheckpointOptions options)
    : impl_([&] {
        const auto runtime = make_own_runtime("checkpoint", LogLevel::kWarning);
        return std::make_unique<Impl>(*runtime, runtime, checkpoint::make_single_rank(), nullptr,
                                      std::move(options));
      }()) {}

CheckpointManager::~CheckpointManager() = default;

void CheckpointManager::add_source(std::string name, SourcePtr source) {
  impl_->add(name, std::move(source), false);
}
void CheckpointManager::add_source_per_rank(const std::string& name, SourcePtr source) {
  impl_->add(name, std::move(source), true);
}
void CheckpointManager::save(std::int64_t step, SaveOptions options) { impl_->save(step, options); }
void CheckpointManager::wait() { impl_->wait(); }
std::optional<std::int64_t> CheckpointManager::restore() { return impl_->restore(); }

}  // namespace torchspan
