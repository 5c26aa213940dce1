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

/// How deep values may be nested on the wire; more is refused with Error{kInvalid} on both sides.
inline constexpr std::uint32_t kMaxNesting = 256;

/// A value taken apart: its bytes, and beside them what bytes cannot hold. The value bytes name a tensor or a
/// reference by its index in these tables. `tensors` are the sender's own tensor objects in the order met, so
/// an interceptor may look at them and replace them in place; pack() (tensors.h) turns them into segments.
/// `references` are opaque here: `rpc` knows their type and turns them into the frame's handles.
struct Payload {
  Bytes value;
  std::vector<at::Tensor> tensors;
  std::vector<std::shared_ptr<void>> references;
};

/// Counts how deep a value is nested while it is encoded or decoded.
class NestingCounter {
 protected:
  NestingCounter() = default;

 private:
  friend class NestingScope;
  [[noreturn]] static void throw_too_deep();
  std::uint32_t depth_ = 0;
};

/// One level of nesting for as long as it lives; beyond kMaxNesting its constructor throws Error{kInvalid}.
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

/// Appends values to a payload and uses the capacity its vectors have. The payload must outlive the encoder,
/// and its `value` is filled in when the encoder is destroyed or finish() is called; until then it is empty.
/// Not thread-safe.
class Encoder : public NestingCounter {
 public:
  explicit Encoder(Payload& payload) : payload_(payload), bytes_(with_room(std::move(payload.value))) {}
  ~Encoder() { finish(); }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  ByteWriter& bytes() { return bytes_; }
  /// Puts a tensor, defined or not, into the tensor table; its storage is neither read nor copied here.
  void tensor(const at::Tensor& tensor) { put_index(payload_.tensors, tensor); }
  /// Puts an opaque object into the reference table.
  void reference(std::shared_ptr<void> object) { put_index(payload_.references, std::move(object)); }
  /// Hands the bytes to the payload. Encoding may go on afterwards only with a new encoder.
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

/// Reads the values of a payload in the order they were written. Whatever the bytes are, it gives values or
/// throws Error{kInvalid}. The payload must outlive it, and keeps its own hold on tensors until expect_end()
/// and on references. Not thread-safe.
class Decoder : public NestingCounter {
 public:
  explicit Decoder(Payload& payload) : payload_(payload), bytes_(payload.value) {}
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  ByteReader& bytes() { return bytes_; }
  /// The tensor whose index comes next; Error{kInvalid} when the table has no such entry.
  at::Tensor tensor() { return payload_.tensors[get_index(payload_.tensors.size(), "tensor")]; }
  /// The opaque object whose index comes next; Error{kInvalid} when the table has no such entry.
  std::shared_ptr<void> reference() {
    return payload_.references[get_index(payload_.references.size(), "reference")];
  }
  /// Throws Error{kInvalid} unless every value byte was read. Then the payload lets go of its tensors: they
  /// belong to the values that were decoded.
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
