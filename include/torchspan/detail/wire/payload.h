#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>

#include <torchspan/core/bytes.h>

namespace torchspan::wire {

/// Maximum nesting of values on the wire; more throws Error{kInvalid} on both sides.
inline constexpr std::uint32_t kMaxNesting = 256;

/// An encoded value: its bytes, and tables of what bytes cannot hold, which they reference by index.
/// `tensors` are the sender's tensor objects in encoding order; an interceptor may replace them in place,
/// and pack() (tensors.h) turns them into segments. `references` are opaque; `rpc` turns them into the
/// frame's handles.
struct Payload {
  Bytes value;
  std::vector<at::Tensor> tensors;
  std::vector<std::shared_ptr<void>> references;
};

/// Counts the nesting depth of a value during encoding or decoding.
class NestingCounter {
 protected:
  NestingCounter() = default;

 private:
  friend class NestingScope;
  [[noreturn]] static void throw_too_deep();
  std::uint32_t depth_ = 0;
};

/// One level of nesting; beyond kMaxNesting its constructor throws Error{kInvalid}.
class NestingScope {
 public:
  explicit NestingScope(NestingCounter& counter) : counter_(counter) {
    if (counter_.depth_ >= kMaxNesting) NestingCounter::throw_too_deep();
    ++counter_.depth_;
  }
  ~NestingScope() { --counter_.depth_; }
  NestingScope(const NestingScope&) = delete;
  NestingScope& operator=(const NestingScope&) = delete;

 private:
  NestingCounter& counter_;
};

/// Appends values to a payload, using its vectors' capacity. The payload must outlive the encoder. `value`
/// is empty until finish() or the destructor fills it in. Not thread-safe.
class Encoder : public NestingCounter {
 public:
  explicit Encoder(Payload& payload) : payload_(payload), bytes_(with_room(std::move(payload.value))) {}
  ~Encoder() { finish(); }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  ByteWriter& bytes() { return bytes_; }
  /// Adds a tensor, defined or not, to the tensor table, without reading or copying its storage.
  void tensor(const at::Tensor& tensor) { put_index(payload_.tensors, tensor); }
  /// Adds an opaque object to the reference table.
  void reference(std::shared_ptr<void> object) { put_index(payload_.references, std::move(object)); }
  /// Moves the bytes to the payload. To encode more, use a new encoder.
  void finish() {
    if (!finished_) payload_.value = bytes_.take();
    finished_ = true;
  }

 private:
  template <class T, class U>
  void put_index(std::vector<T>& table, U&& element) {
    bytes_.put(static_cast<std::uint32_t>(table.size()));
    table.push_back(std::forward<U>(element));
  }

  /// One allocation is enough for most calls.
  static Bytes with_room(Bytes bytes) {
    if (bytes.capacity() < 128) bytes.reserve(128);
    return bytes;
  }

  Payload& payload_;
  ByteWriter bytes_;
  bool finished_ = false;
};

/// Reads the values of a payload in the order they were written. Any bytes give values or throw
/// Error{kInvalid}. The payload must outlive it. It holds the tensors until expect_end(), and the
/// references throughout. Not thread-safe.
class Decoder : public NestingCounter {
 public:
  explicit Decoder(Payload& payload) : payload_(payload), bytes_(payload.value) {}
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  ByteReader& bytes() { return bytes_; }
  /// The tensor at the next index; throws Error{kInvalid} if the table has no such entry.
  at::Tensor tensor() { return payload_.tensors[get_index(payload_.tensors.size(), "tensor")]; }
  /// The object at the next index; throws Error{kInvalid} if the table has no such entry.
  std::shared_ptr<void> reference() {
    return payload_.references[get_index(payload_.references.size(), "reference")];
  }
  /// Throws Error{kInvalid} unless every value byte was read. Then releases the payload's tensors to the
  /// decoded values.
  void expect_end() {
    bytes_.expect_end();
    payload_.tensors.clear();
  }

 private:
  std::size_t get_index(std::size_t table_size, const char* table);

  Payload& payload_;
  ByteReader bytes_;
};

}  // namespace torchspan::wire
