#include "checkpoint/manager/prepared_directory.h"

#include <fmt/format.h>

#include <torchspan/core/error.h>

namespace torchspan::checkpoint {

void PreparedDirectory::before_save() {
  if (!prepared_) {
    directory_.disk().make_folder(directory_.path());
    const std::string warning = lock_.take(directory_.path(), describe_holder(rank_));
    if (!warning.empty()) log_.warning(warning);
    prepared_ = true;
  } else if (!failed_) {
    return;
  }
  failed_ = false;
  try {
    directory_.delete_leftovers();
  } catch (const Error& error) {
    log_.warning(fmt::format("leftovers of failed saves stay: {}", error.message()));
  }
}

void PreparedDirectory::before_restore() const {
  delete_dead_leftovers();
  warn_if_read_only();
}

/// Every process that writes here holds the lock, so what is left while no process holds it belongs to dead ones.
void PreparedDirectory::delete_dead_leftovers() const {
  try {
    if (prepared_ || directory_.leftovers().empty()) return;
    DirectoryLock lock;
    // A warning says that this file system has no locks.
    if (lock.take(directory_.path(), describe_holder(rank_)).empty()) directory_.delete_leftovers();
  } catch (const Error& error) {  // another process writes, or this one must not: restoring needs neither
    log_.debug(fmt::format("leftovers of earlier saves stay: {}", error.message()));
  }
}

/// A program that only restores needs no more than read access; another one should not train first.
void PreparedDirectory::warn_if_read_only() const {
  try {
    directory_.disk().check_writable(directory_.path());
  } catch (const Error& error) {
    log_.warning(
        fmt::format("checkpoints can be restored only, and saving one will fail: {}", error.message()));
  }
}

}  // namespace torchspan::checkpoint
