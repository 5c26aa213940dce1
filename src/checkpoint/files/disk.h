#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <sys/types.h>
#include <system_error>
#include <vector>

#include <torchspan/core/bytes.h>

namespace torchspan::checkpoint {

/// The system calls behind a Disk. Tests override them: a full disk, short writes, failing devices.
class DiskCalls {
 public:
  virtual ~DiskCalls() = default;
  virtual int open(const char* path, int flags, unsigned mode);
  virtual ssize_t pread(int fd, void* data, std::size_t size, off_t offset);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t size, off_t offset);
  virtual int fsync(int fd);
  virtual int rename(const char* from, const char* to);
  virtual int access(const char* path, int mode);
  virtual int unlink(const char* path);
  virtual void remove_all(const char* path, std::error_code& error);
};

class Disk;

/// A file being written. Every failure throws an Error that names the path.
class OutputFile {
 public:
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Called with every part of the data after it was written, in order.
  using Written = std::function<void(BytesView part)>;
  /// Appends; starts to write the data back to the device meanwhile.
  void append(BytesView data, const Written& written = {});
  /// Returns once the data is on the device.
  void sync();
  std::uint64_t size() const { return size_; }

 private:
  friend class Disk;
  OutputFile(const Disk& disk, std::string path, int fd);

  const Disk& disk_;
  const std::string path_;
  const int fd_;
  std::uint64_t size_ = 0;
  std::uint64_t handed_over_ = 0;  ///< bytes whose writing back has been started
};

/// A file being read. A sector that the device cannot read is an Error that names the path; in a mapped file it would
/// be a SIGBUS.
class InputFile {
 public:
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// The size when the file was opened.
  std::uint64_t size() const { return size_; }
  /// Passes `size` bytes from `offset` on to `use`, in parts that fit into a cache; fewer if the file ends before.
  void read(std::uint64_t offset, std::uint64_t size, const std::function<void(BytesView)>& use) const;

 private:
  friend class Disk;
  InputFile(const Disk& disk, std::string path, int fd);

  const Disk& disk_;
  const std::string path_;
  const int fd_;
  std::uint64_t size_ = 0;
};

/// Files and folders of one file system, with errors that name the path and say what to do. Thread-safe.
class Disk {
 public:
  /// `calls` must outlive the disk; null: the system's.
  explicit Disk(DiskCalls* calls = nullptr) : calls_(calls != nullptr ? *calls : own_) {}
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  std::unique_ptr<InputFile> open(const std::string& path) const;
  /// Creates the file, or empties it.
  std::unique_ptr<OutputFile> create(const std::string& path) const;
  /// Writes a whole file and syncs it.
  void write_file(const std::string& path, std::string_view text) const;
  /// Replaces a file at once: readers see the old or the new content. Leaves no temporary file if it fails.
  void replace_file(const std::string& path, std::string_view text) const;
  /// Reads a whole file of at most `most_bytes`.
  std::string read_file(const std::string& path, std::uint64_t most_bytes) const;
  /// Returns -1 if there is no such file.
  std::int64_t file_size(const std::string& path) const;

  /// Throws unless this process may create files in the folder or, if it does not exist, the folder.
  void check_writable(const std::string& path) const;
  /// Creates a folder and its parents; it may exist.
  void make_folder(const std::string& path) const;
  /// Makes the entries of a folder durable.
  void sync_folder(const std::string& path) const;
  /// Renames a file or folder in its folder and makes that durable.
  void rename(const std::string& from, const std::string& to) const;
  /// Removes a file or a folder with its contents; it may be missing.
  void remove(const std::string& path) const;
  /// Removes a file, which may be missing; throws for a folder.
  void remove_file(const std::string& path) const;
  using Removal = void (Disk::*)(const std::string& path) const;
  /// Calls remove() or remove_file() after another failure: ignores that it fails.
  void discard(Removal removal, const std::string& path) const noexcept;
  /// Names in a folder, sorted; empty if there is no such folder.
  std::vector<std::string> list(const std::string& path) const;

 private:
  friend class InputFile;
  friend class OutputFile;
  mutable DiskCalls own_;
  DiskCalls& calls_;
};

/// Throws an Error for `number`, an errno: "cannot write 'path': No space left on device; …".
[[noreturn]] void throw_disk_error(const char* verb, const std::string& path, int number);

/// The folder that contains `path`.
std::string parent_of(const std::string& path);

}  // namespace torchspan::checkpoint
