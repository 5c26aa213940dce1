#pragma once
#include <memory>
#include <string>

#include "tests/conformance/transport_node.h"

namespace torchspan::net::conformance {

/// The echo of a peer, in any process.
inline Node::Options echo_options() {
  Node::Options options;
  options.keep_parcels = false;
  options.on_message = [](const std::shared_ptr<Channel>& channel, const Message& message) {
    std::vector<Segment> segments;
    for (const Buffer& buffer : message.segments)
      segments.push_back({buffer.data, buffer.size, buffer.owner});
    try {
      channel->send(message.header, segments);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kDisconnected);
    }
  };
  return options;
}

/// An echo in this process. Its death is the sudden end of its transport, unless the transport has a better
/// way.
class LocalEcho final : public EchoPeer {
 public:
  LocalEcho(World& world, const std::string& name, std::function<void()> before_death = {})
      : node_(std::make_unique<Node>(world, name, echo_options())),
        address_(node_->listen()),
        before_death_(std::move(before_death)) {}

  std::string address() const override { return address_; }
  void kill() override {
    if (before_death_) before_death_();
    node_.reset();
  }

 private:
  std::unique_ptr<Node> node_;
  const std::string address_;
  const std::function<void()> before_death_;
};

}  // namespace torchspan::net::conformance
