#include "checkpoint/commit/rounds.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <fmt/format.h>
#include <functional>
#include <span>
#include <utility>

#include "checkpoint/commit/ranks.h"
#include "checkpoint/files/safetensors.h"
#include "core/api/throw_invalid.h"

namespace torchspan::checkpoint {
namespace {

Bytes to_bytes(const std::string& text) {
  const auto view = std::as_bytes(std::span(text));
  return {view.begin(), view.end()};
}

std::string to_text(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

constexpr const char* kNotRestored = "the checkpoint was not restored";

}  // namespace

std::string SaveRound::run(const SaveJob& job, const std::vector<BytesView>& data, const Retention& retention,
                           const WriteOnOwner& write_on_owner) {
  const std::string what = fmt::format("the checkpoint of step {} was not saved", job.step);
  const std::string tag = fmt::format("save.{:x}.", job.token);
  std::optional<Error> failure;
  std::string name;
  try {
    const auto written = ranks_.exchange_since(job.departures, tag + "written",
                                               outcome_of([&] { return write(job, data, write_on_owner); }));
    failure = joint_failure(written, ranks_.names(), what);
    RankOutcome committed;
    if (ranks_.commits() && !failure) {
      committed = outcome_of([&] {
        std::vector<Bytes> reports;
        for (const RankOutcome& outcome : written) reports.push_back(outcome.result);
        return to_bytes(commit(job, reports));
      });
    }
    if (ranks_.commits() && (failure || committed.failure)) abandon(job);
    // Also after a failure: every rank knows that the others have ended this save.
    const auto ended = ranks_.exchange_since(job.departures, tag + "committed", committed);
    if (!failure) failure = joint_failure(ended, ranks_.names(), what);
    name = to_text(ended.front().result);
  } catch (const Error& error) {
    if (ranks_.commits()) abandon(job);
    throw Error(error.kind(), fmt::format("the checkpoint of step {} may not have been saved: {}", job.step,
                                          error.message()));
  }
  if (failure) throw *failure;
  if (ranks_.commits()) {
    try {
      directory_.delete_old(retention, name);
    } catch (const Error& error) {
      log_.warning(fmt::format("old checkpoints were not deleted: {}", error.message()));
    }
  }
  return name;
}

Bytes SaveRound::write(const SaveJob& job, const std::vector<BytesView>& data,
                       const WriteOnOwner& write_on_owner) const {
  if (job.failure) throw *job.failure;
  const std::string folder = directory_.path_of(Directory::partial_name(job.step, job.token));
  std::vector<Future<std::string>> owners;
  for (const Plan::Share& share : job.plan.shares) {
    if (share.rank != ranks_.index() || share.owner.empty()) continue;
    directory_.disk().make_folder(folder);
    owners.push_back(write_on_owner(share, folder + "/" + share.file));
  }
  // The owners write meanwhile. The reports are in the order of the shares, of which the rank's own is the first.
  ByteWriter reports;
  std::exception_ptr failure;
  const auto collect = [&](const std::function<Bytes()>& report) {
    try {
      reports.put_bytes(report());
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  if (const Plan::Share* own = job.plan.own_share(ranks_.index()))
    collect([&] { return encode_report(write_own(*own, folder, data)); });
  // Waits for all of them, so that none writes into a folder that is being deleted.
  for (const Future<std::string>& owner : owners) collect([&] { return to_bytes(owner.wait()); });
  if (failure) std::rethrow_exception(failure);
  return reports.take();
}

FileReport SaveRound::write_own(const Plan::Share& share, const std::string& folder,
                                const std::vector<BytesView>& data) const {
  const Disk& disk = directory_.disk();
  disk.make_folder(folder);
  const WrittenFile written =
      write_tensor_file(disk, folder + "/" + share.file, share.entries, data, {{"format", "pt"}});
  disk.sync_folder(folder);
  return {{written.bytes, written.header.data_start, written.head_checksum}, written.checksums};
}

std::string SaveRound::commit(const SaveJob& job, const std::vector<Bytes>& reports) const {
  const Disk& disk = directory_.disk();
  const std::string partial = Directory::partial_name(job.step, job.token);
  const std::string folder = directory_.path_of(partial);
  disk.make_folder(folder);
  Manifest manifest;
  manifest.step = job.step;
  manifest.world_size = static_cast<int>(ranks_.size());
  manifest.metric = job.metric;
  manifest.values = job.values;
  std::vector<ByteReader> readers(reports.begin(), reports.end());
  std::vector<FileReport> files;
  for (const Plan::Share& share : job.plan.shares) {
    files.push_back(decode_report(readers.at(share.rank)));
    const std::string path = folder + "/" + share.file;
    if (disk.file_size(path) != static_cast<std::int64_t>(files.back().file.bytes)) {
      throw_invalid(
          "{} wrote '{}', but here it is missing or has another size; the directory must be on a file system "
          "that all ranks share",
          share.owner.empty() ? ranks_.names()[share.rank] : fmt::format("worker '{}'", share.owner), path);
    }
  }
  fill_manifest(manifest, job.listings, job.plan, files);
  const std::string index = encode_index(index_of(manifest));
  disk.write_file(folder + "/" + kIndexFile, index);
  manifest.files[kIndexFile] = {index.size(), index.size(), checksum_of(std::as_bytes(std::span(index)))};
  disk.write_file(folder + "/" + kManifestFile, encode_manifest(manifest));
  disk.sync_folder(folder);
  return directory_.commit(partial, job.step);
}

void SaveRound::abandon(const SaveJob& job) const noexcept {
  try {
    directory_.disk().remove(directory_.path_of(Directory::partial_name(job.step, job.token)));
  } catch (const std::exception& error) {
    log_.warning(fmt::format("an incomplete checkpoint was not deleted: {}", error.what()));
  }
}

std::optional<std::int64_t> RestoreRound::run(const Load& load) {
  const std::uint64_t since = ranks_.departures().count;
  for (;;) {
    const auto proposals = ranks_.exchange_since(
        since, "restore.proposed",
        ranks_.commits() ? outcome_of([&] { return to_bytes(propose()); }) : RankOutcome());
    if (const auto failure = joint_failure(proposals, ranks_.names(), kNotRestored)) throw *failure;
    const std::string name = to_text(proposals.front().result);
    if (name.empty()) return std::nullopt;
    const std::string folder = directory_.path_of(name);
    Manifest manifest;
    const auto checked = ranks_.exchange_since(since, "restore.checked", outcome_of([&] {
                                                 manifest = open_manifest(directory_.disk(), folder);
                                                 verify_data(directory_.disk(), folder, manifest,
                                                             ranks_.index(), ranks_.size());
                                                 return Bytes();
                                               }));
    if (const auto damage =
            joint_failure(checked, ranks_.names(), fmt::format("'{}' cannot be used", name))) {
      reject(name, damage->message());
      continue;
    }
    const auto loaded =
        ranks_.exchange_since(since, "restore.loaded", outcome_of([&] { return load(folder, manifest); }));
    if (const auto failure = joint_failure(loaded, ranks_.names(), kNotRestored)) throw *failure;
    if (ranks_.commits()) report_unused(name, manifest, loaded);
    return manifest.step;
  }
}

std::string RestoreRound::propose() {
  bool any = false;
  for (const Committed& one : directory_.committed()) {
    any = true;
    if (!rejected_.contains(one.name)) return one.name;
  }
  if (any) {
    throw_invalid("no checkpoint in '{}' can be used: {}; to start from the beginning, remove them",
                  directory_.path(), first_reason_);
  }
  return {};
}

void RestoreRound::report_unused(const std::string& name, const Manifest& manifest,
                                 const std::vector<RankOutcome>& loaded) const {
  constexpr std::size_t kShown = 3;
  std::string shown;
  std::size_t unused = 0, index = 0;
  for (const auto& [tensor, saved] : manifest.tensors) {
    const std::size_t place = index++;
    const bool used = std::any_of(loaded.begin(), loaded.end(), [&](const RankOutcome& outcome) {
      return place < outcome.result.size() && outcome.result[place] != std::byte{0};
    });
    // The state of a generator belongs to a rank, and there may be fewer ranks now.
    if (used || tensor.starts_with("rng.")) continue;
    if (++unused <= kShown) shown += fmt::format("{}'{}'", unused == 1 ? "" : ", ", tensor);
  }
  if (unused == 0) return;
  if (unused > kShown) shown += fmt::format(" and {} more", unused - kShown);
  log_.warning(fmt::format(
      "'{}' was restored without {} of its tensors, which no rank has registered: {}; register the objects "
      "that have them, unless this program does not need them",
      name, unused, shown));
}

void RestoreRound::reject(const std::string& name, const std::string& why) {
  rejected_.insert(name);
  if (first_reason_.empty()) first_reason_ = why;
  if (ranks_.commits()) log_.warning(fmt::format("{}; an older checkpoint is tried", why));
}

}  // namespace torchspan::checkpoint
