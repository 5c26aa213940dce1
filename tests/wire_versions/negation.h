#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include <ATen/ATen.h>

#include <torchspan/detail/rpc/extension.h>

/// A feature of the wire format that exists in tests only, and ranges of versions with and without it.
namespace torchspan::wire_versions {

constexpr std::uint32_t kFeature = 1u << 31;

/// A message that only newer releases know.
struct News {
  static constexpr wire::MessageType kType{0x8001};
  static constexpr std::string_view kName = "news";
  static constexpr std::uint32_t kFeature = wire_versions::kFeature;
  using Reply = std::int64_t;
  std::int64_t number = 0;
};
/// The same without its feature, as a faulty release would send it.
struct UnannouncedNews {
  static constexpr wire::MessageType kType{0x8002};
  static constexpr std::string_view kName = "unannounced news";
  using Reply = std::int64_t;
  std::int64_t number = 0;
};

}  // namespace torchspan::wire_versions

namespace torchspan {
template <>
struct Wire<wire_versions::News> : WireStruct<wire_versions::News, "News", &wire_versions::News::number> {};
template <>
struct Wire<wire_versions::UnannouncedNews>
    : WireStruct<wire_versions::UnannouncedNews, "UnannouncedNews", &wire_versions::UnannouncedNews::number> {
};
}  // namespace torchspan

namespace torchspan::wire_versions {

constexpr ProtocolRange kOld{1, 1, 0};
constexpr ProtocolRange kBoth{1, 2, kFeature};
constexpr ProtocolRange kNew{2, 2, kFeature};

/// Sends integer tensors negated, and says so in a blob: a receiver that does not know the feature would compute with
/// wrong numbers.
class Negation final : public rpc::Extension, public rpc::Interceptor {
 public:
  void attach(rpc::Registrar& registrar) override {
    registrar.intercept(*this);
    registrar.handle<News>(rpc::RunOn::kPool,
                           [](const rpc::CallInfo&, const News& news) { return news.number + 1; });
  }
  std::string_view name() const override { return "negation"; }
  std::uint32_t feature() const override { return kFeature; }
  Bytes outgoing(const rpc::CallInfo&, std::span<at::Tensor> tensors) override {
    ++sent_;
    negate(tensors);
    return Bytes(1);
  }
  void undo(const rpc::CallInfo&, BytesView) override {}
  rpc::EnvironmentValuePtr incoming(const rpc::CallInfo&, std::span<at::Tensor> tensors,
                                    BytesView blob) override {
    if (!blob.empty()) negate(tensors);
    return nullptr;
  }
  int sent() const { return sent_; }

 private:
  static void negate(std::span<at::Tensor> tensors) {
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined() && !at::isFloatingType(tensor.scalar_type())) tensor = tensor.neg();
    }
  }
  std::atomic<int> sent_{0};
};

}  // namespace torchspan::wire_versions
