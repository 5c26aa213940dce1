#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

#include <torchspan/core/error.h>
#include <torchspan/data.h>

#include "core/api/descriptor.h"
#include "core/api/throw_invalid.h"

namespace torchspan {

class RecordFiles::Impl {
 public:
  Impl(const std::vector<std::string>& files, const RecordFileOptions& options)
      : shape_(options.shape), dtype_(options.dtype), header_(options.header_bytes) {
    const auto element = static_cast<std::int64_t>(c10::elementSize(dtype_));
    bytes_ = element;
    for (const std::int64_t length : shape_) {
      if (length <= 0)
        throw_invalid("RecordFileOptions::shape has a length of {}; expected 1 or more", length);
      if (__builtin_mul_overflow(bytes_, length, &bytes_))
        throw_invalid("RecordFileOptions::shape: a record of this shape has too many bytes");
    }
    if (header_ < 0) throw_invalid("RecordFileOptions::header_bytes is {}; expected 0 or more", header_);
    if (options.stride < 0 || options.stride > bytes_ / element) {
      throw_invalid("RecordFileOptions::stride is {}; expected 0 to {}, the elements of a record",
                    options.stride, bytes_ / element);
    }
    stride_ = options.stride == 0 ? bytes_ : options.stride * element;
    if (files.empty()) throw_invalid("RecordFiles needs at least one file");
    for (const std::string& file : files) open(file, options.stride == 0);
  }

  std::int64_t size() const { return files_.back().end; }

  at::Tensor read(const std::vector<std::int64_t>& records) const {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(records.size())};
    shape.insert(shape.end(), shape_.begin(), shape_.end());
    at::Tensor batch = at::empty(shape, at::TensorOptions(dtype_));
    auto* place = static_cast<char*>(batch.data_ptr());
    for (const std::int64_t record : records) {
      if (record < 0 || record >= size())
        throw_invalid("record {} does not exist: '{}' and its like have {}", record, files_.front().path,
                      size());
      const auto file = std::upper_bound(files_.begin(), files_.end(), record,
                                         [](std::int64_t at, const File& one) { return at < one.end; });
      read_at(*file, header_ + (record - file->begin) * stride_, place);
      place += bytes_;
    }
    return batch;
  }

 private:
  struct File {
    std::string path;
    Descriptor descriptor;
    std::int64_t begin, end;  ///< records
  };

  void open(const std::string& path, bool whole) {
    Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat about {};
    if (!descriptor || ::fstat(descriptor.get(), &about) != 0)
      throw_invalid("cannot read '{}': {}", path, std::strerror(errno));
    if (!S_ISREG(about.st_mode)) throw_invalid("'{}' is no file", path);
    const std::int64_t left = about.st_size - header_;
    if (left < bytes_) {
      throw_invalid("'{}' has {} bytes, less than a header of {} and a record of {}", path, about.st_size,
                    header_, bytes_);
    }
    if (whole && left % bytes_ != 0) {
      throw_invalid(
          "'{}' ends within a record: after a header of {}, {} bytes are left, and a record has {}; check "
          "shape and dtype",
          path, header_, left, bytes_);
    }
    const std::int64_t begin = files_.empty() ? 0 : files_.back().end;
    files_.push_back({path, std::move(descriptor), begin, begin + (left - bytes_) / stride_ + 1});
  }

  void read_at(const File& file, std::int64_t offset, char* place) const {
    for (std::int64_t done = 0; done < bytes_;) {
      const ssize_t got = ::pread(file.descriptor.get(), place + done,
                                  static_cast<std::size_t>(bytes_ - done), offset + done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_invalid("cannot read '{}': {}", file.path, std::strerror(errno));
      if (got == 0) throw_invalid("'{}' has become shorter while it is read", file.path);
      done += got;
    }
  }

  const std::vector<std::int64_t> shape_;
  const at::ScalarType dtype_;
  const std::int64_t header_;
  std::int64_t bytes_ = 0;   ///< of a record
  std::int64_t stride_ = 0;  ///< bytes between the starts of two records
  std::vector<File> files_;
};

RecordFiles::RecordFiles(const std::vector<std::string>& files, const RecordFileOptions& options)
    : impl_(std::make_shared<const Impl>(files, options)) {}
std::int64_t RecordFiles::size() const { return impl_->size(); }
at::Tensor RecordFiles::get_batch(const std::vector<std::int64_t>& records) const {
  return impl_->read(records);
}

}  // namespace torchspan
