#include "checkpoint/files/directory.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <random>
#include <set>
#include <unistd.h>

#include "checkpoint/files/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/processes.h"

namespace torchspan::checkpoint::directory_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torchspan::testing::error_of;
using torchspan::testing::error_text;
using torchspan::testing::TemporaryFolder;

/// Fails calls by their number; writes at most `most` bytes at a time.
class FaultyCalls final : public DiskCalls {
 public:
  int open(const char* path, int flags, unsigned mode) override {
    return fails() ? -1 : DiskCalls::open(path, flags, mode);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t size, off_t offset) override {
    if (fails()) return -1;
    return DiskCalls::pwrite(fd, data, std::min(size, most), offset);
  }
  int fsync(int fd) override { return fails() ? -1 : DiskCalls::fsync(fd); }
  int rename(const char* from, const char* to) override { return fails() ? -1 : DiskCalls::rename(from, to); }

  int calls = 0;
  int failing_call = -1;
  int number = EIO;
  std::size_t most = std::size_t{1} << 30;

 private:
  bool fails() {
    if (calls++ != failing_call) return false;
    errno = number;
    return true;
  }
};

std::vector<std::uint8_t> pattern(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint8_t> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

/// Writes a checkpoint of one file with two tensors; returns the name of its folder.
std::string save(const Directory& directory, std::int64_t step, std::optional<double> metric = {}) {
  const Disk& disk = directory.disk();
  const std::string partial = Directory::partial_name(step, 0xABC);
  const std::string folder = directory.path_of(partial);
  disk.make_folder(folder);
  const auto a = pattern(48, static_cast<std::uint64_t>(step)), b = pattern(10, 7);
  const WrittenFile written = write_tensor_file(
      disk, folder + "/model.safetensors", {{"a", ElementType::kF32, {3, 4}}, {"b", ElementType::kU8, {10}}},
      {std::as_bytes(std::span(a)), std::as_bytes(std::span(b))}, {{"format", "pt"}});
  Manifest manifest;
  manifest.step = step;
  manifest.metric = metric;
  manifest.files["model.safetensors"] = {written.bytes, written.header.data_start, written.head_checksum};
  for (std::size_t i = 0; i < 2; ++i) {
    const HeaderEntry& entry = written.header.entries[i];
    manifest.tensors[entry.name] = {
        entry.type,
        entry.shape,
        {{whole_box(entry.shape), "model.safetensors", entry.name, entry.begin, written.checksums[i]}}};
  }
  disk.write_file(folder + "/" + kManifestFile, encode_manifest(manifest));
  disk.sync_folder(folder);
  return directory.commit(partial, step);
}

/// The step of the newest checkpoint in which open_manifest() and verify_data() find no damage, or -1; the names of the
/// newer ones, and the damage of the last of them.
struct Found {
  std::int64_t step = -1;
  std::vector<std::string> rejected;
  std::string why;
};
Found newest_undamaged(const Directory& directory) {
  Found found;
  for (const Committed& one : directory.committed()) {
    try {
      const std::string folder = directory.path_of(one.name);
      verify_data(directory.disk(), folder, open_manifest(directory.disk(), folder));
      found.step = one.step;
      break;
    } catch (const Error& error) {
      found.rejected.push_back(one.name);
      found.why = error.message();
    }
  }
  return found;
}

void change_byte(const std::string& path, std::uint64_t at, int bit) {
  const int fd = ::open(path.c_str(), O_RDWR);
  std::uint8_t byte = 0;
  ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
  byte = static_cast<std::uint8_t>(byte ^ (1 << bit));
  ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
  ::close(fd);
}

/// A disk that may be read only.
class ReadOnlyCalls final : public DiskCalls {
 public:
  int access(const char* path, int mode) override {
    asked = path;
    if ((mode & W_OK) == 0) return DiskCalls::access(path, mode);
    errno = EROFS;
    return -1;
  }
  std::string asked;
};

TEST(Disk, ChecksTheNearestFolderThatExists) {
  const TemporaryFolder folder;
  const Disk usual;
  for (const char* name : {"", "/a", "/a/b/c"}) usual.check_writable(folder.path() + name);
  usual.check_writable("a/relative/path");
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/a"));
  ReadOnlyCalls calls;
  const Disk disk(&calls);
  const Error error = error_of([&] { disk.check_writable(folder.path() + "/a/b"); });
  EXPECT_EQ(error.kind(), ErrorKind::kDenied);
  EXPECT_THAT(error.message(), HasSubstr(folder.path() + "/a/b"));
  EXPECT_EQ(calls.asked, folder.path());
  usual.write_file(folder.path() + "/file", "text");
  EXPECT_THAT(error_text([&] { usual.check_writable(folder.path() + "/file/run"); }), HasSubstr("file/run"));
}

TEST(CheckpointDirectory, FindsTheNewestCheckpointAndNamesItInLatest) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  EXPECT_EQ(newest_undamaged(directory).step, -1);
  save(directory, 5);
  EXPECT_EQ(save(directory, 20), "step-00000020");
  save(directory, 7);
  EXPECT_EQ(newest_undamaged(directory).step, 20);
  EXPECT_EQ(disk.read_file(folder.path() + "/latest", 100), "step-00000007\n");
  EXPECT_EQ(save(directory, 20), "step-00000020.2");
  EXPECT_EQ(directory.committed().front().name, "step-00000020.2");
}

TEST(CheckpointDirectory, FindsTheDamageWhateverBitOfACheckpointIsFlipped) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  save(directory, 1);
  const std::string path = directory.path_of(save(directory, 2));
  for (const char* file : {"/model.safetensors", "/manifest.json"}) {
    const auto size = static_cast<std::uint64_t>(disk.file_size(path + file));
    for (std::uint64_t at = 0; at < size; ++at) {
      const int bit = static_cast<int>(at % 8);
      change_byte(path + file, at, bit);
      const Found found = newest_undamaged(directory);
      ASSERT_EQ(found.step, 1) << file << " byte " << at;
      ASSERT_THAT(found.rejected, ElementsAre("step-00000002"));
      ASSERT_THAT(found.why, HasSubstr(path + file));
      change_byte(path + file, at, bit);
    }
  }
  EXPECT_EQ(newest_undamaged(directory).step, 2);
}

TEST(CheckpointDirectory, FindsTruncatedMissingAndMixedFiles) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  const std::string first = directory.path_of(save(directory, 1));
  for (const char* file : {"/model.safetensors", "/manifest.json"}) {
    const std::string path = directory.path_of(save(directory, 2));
    for (const std::int64_t size : {disk.file_size(path + file) - 1, std::int64_t{9}, std::int64_t{0}}) {
      std::filesystem::resize_file(path + file, static_cast<std::uintmax_t>(size));
      EXPECT_EQ(newest_undamaged(directory).step, 1) << file << " of " << size << " bytes";
    }
    std::filesystem::remove(path + file);
    EXPECT_THAT(newest_undamaged(directory).why, HasSubstr("missing"));
    disk.remove(path);
  }
  const std::string second = directory.path_of(save(directory, 2));
  std::filesystem::copy_file(first + "/model.safetensors", second + "/model.safetensors",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(newest_undamaged(directory).step, 1) << "files of two checkpoints are mixed";
  EXPECT_THAT(newest_undamaged(directory).why, HasSubstr("belongs to another checkpoint"));
}

TEST(CheckpointDirectory, KeepsTheLastAndTheBestCheckpoints) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  std::string last;
  for (const auto& [step, metric] :
       std::vector<std::pair<int, double>>{{1, 5}, {2, 1}, {3, 9}, {4, 2}, {5, 7}, {6, 8}})
    last = save(directory, step, metric);
  const auto steps = [&] {
    std::vector<std::int64_t> all;
    for (const Committed& one : directory.committed()) all.push_back(one.step);
    return all;
  };
  directory.delete_old({.keep_last = 2, .keep_best = 2}, last);
  EXPECT_THAT(steps(), ElementsAre(6, 5, 4, 2));
  directory.delete_old({.keep_last = 1, .keep_best = 1, .lower_is_better = false}, last);
  EXPECT_THAT(steps(), ElementsAre(6));
}

TEST(CheckpointDirectory, NeverDeletesTheNewestVerifiedCheckpoint) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  const std::string good = save(directory, 1);
  disk.remove(directory.path_of(save(directory, 2)) + "/manifest.json");
  save(directory, 3);
  directory.delete_old({.keep_last = 1}, good);
  EXPECT_EQ(directory.committed().size(), 3u) << "damaged ones stay while an older one stays";
  directory.delete_old({.keep_last = 1}, "step-00000003");
  EXPECT_EQ(directory.committed().size(), 1u);
}

TEST(CheckpointDirectory, DeletesWhatInterruptedProcessesLeft) {
  const TemporaryFolder folder;
  const Disk disk;
  const Directory directory(disk, folder.path());
  save(directory, 1);
  disk.make_folder(directory.path_of(Directory::partial_name(2, 3)) + "/inner");
  disk.make_folder(directory.path_of("trash-step-00000000"));
  disk.make_folder(directory.path_of("notes"));
  EXPECT_THAT(directory.leftovers(), ElementsAre(Directory::partial_name(2, 3), "trash-step-00000000"));
  directory.delete_leftovers();
  EXPECT_THAT(directory.leftovers(), IsEmpty());
  EXPECT_THAT(disk.list(folder.path()), ElementsAre("latest", "notes", "step-00000001"));
}

TEST(CheckpointDirectory, HasAllOrNothingOfACheckpointWhicheverSystemCallFails) {
  const TemporaryFolder folder;
  int calls = 0;
  {
    FaultyCalls all;
    const Disk disk(&all);
    save(Directory(disk, folder.path()), 2);
    calls = all.calls;
    disk.remove(folder.path() + "/step-00000002");
  }
  ASSERT_GT(calls, 10);
  for (int failing = 0; failing < calls; ++failing) {
    SCOPED_TRACE(fmt::format("call {} fails", failing));
    FaultyCalls faulty;
    faulty.failing_call = failing;
    faulty.number = failing % 2 == 0 ? EIO : ENOSPC;
    const Disk disk(&faulty);
    const Directory directory(disk, folder.path());
    const Error error = error_of([&] { save(directory, 2); });
    EXPECT_THAT(error.message(), HasSubstr(folder.path()));
    EXPECT_EQ(error.kind(), failing % 2 == 0 ? ErrorKind::kInvalid : ErrorKind::kOverloaded);
    const Disk sound;
    const Directory after(sound, folder.path());
    EXPECT_THAT(after.committed(), IsEmpty());
    after.delete_leftovers();
    EXPECT_THAT(sound.list(folder.path()), ElementsAre("latest"));
  }
}

/// A disk on which a folder cannot be renamed to trash, or cannot be removed, after its commit has failed.
class StubbornCalls final : public DiskCalls {
 public:
  int rename(const char* from, const char* to) override {
    if (std::string(to).ends_with("/latest") ||
        (!renames && std::string(to).find("/trash-") != std::string::npos)) {
      errno = EIO;
      return -1;
    }
    return DiskCalls::rename(from, to);
  }
  void remove_all(const char* path, std::error_code& error) override {
    if (removes) return DiskCalls::remove_all(path, error);
    error = std::make_error_code(std::errc::io_error);
  }
  bool renames = true, removes = true;
};

TEST(CheckpointDirectory, HasNoCheckpointWhoseCommitFailedAlthoughItCannotBeRenamedOrRemoved) {
  for (const bool renames : {true, false}) {
    const TemporaryFolder folder;
    StubbornCalls calls;
    calls.renames = renames;
    calls.removes = !renames;
    const Disk disk(&calls);
    const Directory directory(disk, folder.path());
    EXPECT_THAT(error_text([&] { save(directory, 2); }), HasSubstr("/latest"));
    EXPECT_EQ(directory.committed().size(), 0u) << renames;
  }
}

/// Another process commits a checkpoint of the same name at the moment of the rename.
class OvertakenCalls final : public DiskCalls {
 public:
  int rename(const char* from, const char* to) override {
    if (std::filesystem::is_directory(from)) std::filesystem::create_directories(std::string(to) + "/theirs");
    return DiskCalls::rename(from, to);
  }
};

TEST(CheckpointDirectory, KeepsTheCheckpointOfAnotherProcessWhenItsCommitFails) {
  const TemporaryFolder folder;
  OvertakenCalls calls;
  const Disk disk(&calls);
  const Directory directory(disk, folder.path());
  EXPECT_THAT(error_text([&] { save(directory, 2); }), HasSubstr("step-00000002"));
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/step-00000002/theirs"));
}

/// A device with unreadable sectors in one file: those that begin at `from`.
class BadSectors final : public DiskCalls {
 public:
  BadSectors(std::string path, off_t from) : path_(std::move(path)), from_(from) {}
  int open(const char* path, int flags, unsigned mode) override {
    const int fd = DiskCalls::open(path, flags, mode);
    bad_.erase(fd);  // the number may be that of a closed file
    if (path == path_) bad_.insert(fd);
    return fd;
  }
  ssize_t pread(int fd, void* data, std::size_t size, off_t offset) override {
    if (!bad_.contains(fd) || offset + static_cast<off_t>(size) <= from_)
      return DiskCalls::pread(fd, data, size, offset);
    errno = EIO;
    return -1;
  }

 private:
  const std::string path_;
  const off_t from_;
  std::set<int> bad_;
};

TEST(CheckpointDirectory, FindsWhatTheDeviceCannotRead) {
  const TemporaryFolder folder;
  const Disk sound;
  const Directory directory(sound, folder.path());
  save(directory, 1);
  const std::string path = directory.path_of(save(directory, 2)) + "/model.safetensors";
  for (const off_t from : {off_t{0}, off_t{4096}}) {  // in the header, and in the data
    BadSectors calls(path, from);
    const Disk disk(&calls);
    const Found found = newest_undamaged(Directory(disk, folder.path()));
    EXPECT_EQ(found.step, 1);
    EXPECT_THAT(found.why, HasSubstr("cannot read '" + path + "': Input/output error"));
  }
  EXPECT_EQ(newest_undamaged(directory).step, 2);
}

TEST(CheckpointDisk, FinishesShortWritesAndInterruptedOnes) {
  const TemporaryFolder folder;
  FaultyCalls calls;
  calls.most = 3;
  calls.failing_call = 4;
  calls.number = EINTR;
  const Disk disk(&calls);
  const std::string path = folder.path() + "/file";
  disk.write_file(path, "a text of some length");
  EXPECT_EQ(disk.read_file(path, 100), "a text of some length");
  EXPECT_GT(calls.calls, 7);
}

TEST(CheckpointDisk, NamesThePathAndTheCause) {
  const Disk disk;
  EXPECT_THAT(error_text([&] { disk.create("/proc/nothing/here"); }),
              HasSubstr("cannot create '/proc/nothing/here': No such file or directory"));
  EXPECT_THAT(error_text([&] { disk.read_file("/proc/self/no-such-file", 1); }), HasSubstr("cannot open"));
}

TEST(MappedFile, RefusesWhatIsNoSafetensorsFile) {
  const TemporaryFolder folder;
  const Disk disk;
  const std::string path = folder.path() + "/x.safetensors";
  EXPECT_THAT(error_text([&] { MappedFile file(path); }), HasSubstr("No such file"));
  EXPECT_THAT(error_text([&] { MappedFile file(folder.path()); }), HasSubstr("cannot map"));
  disk.write_file(path, "");
  EXPECT_THAT(error_text([&] { MappedFile file(path); }), HasSubstr("empty"));
  disk.write_file(path, "PK\x03\x04 something else altogether");
  EXPECT_THAT(error_text([&] { MappedFile file(path); }), HasSubstr(path));
}

TEST(TensorFile, AlignsItsDataToPages) {
  const TemporaryFolder folder;
  const Disk disk;
  const auto data = pattern(24, 1);
  write_tensor_file(disk, folder.path() + "/x", {{"w", ElementType::kF64, {3}}},
                    {std::as_bytes(std::span(data))}, {});
  const MappedFile file(folder.path() + "/x");
  EXPECT_EQ(file.header().data_start % 4096, 0u);
  EXPECT_TRUE(std::ranges::equal(file.data(*file.find("w")), std::as_bytes(std::span(data))));
  EXPECT_EQ(file.find("v"), nullptr);
}

}  // namespace torchspan::checkpoint::directory_test
