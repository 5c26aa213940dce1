#pragma once
#include <functional>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "tests/conformance/collective_backends.h"
#include "tests/conformance/collective_oracle.h"

namespace torchspan::testing {

inline std::vector<CollectiveRow> rows_with_others() {
  std::vector<CollectiveRow> rows = collective_rows();
  std::erase_if(rows, [](const CollectiveRow& row) { return row.ranks == 1; });
  return rows;
}

/// A message, and the tensor that a receive has for it although dtype or shape differ.
struct MismatchedMessage {
  at::Tensor sent, received;
};
inline std::vector<MismatchedMessage> mismatched_messages() {
  return {{at::ones({3}), at::ones({4})},       {at::ones({3}), at::ones({3}, at::kInt)},
          {at::ones({300000}), at::ones({3})},  {at::ones({3}), at::ones({300000})},
          {at::ones({2, 3}), at::ones({3, 2})}, {at::ones({0, 3}), at::ones({3, 0})}};
}

/// Tests of send() and recv(). On rows of devices, the tensors are on the device.
class MessageSuite : public CollectiveSuite {
 protected:
  MessageSuite() { world_.make_group = make_group_of_row; }
  static at::Tensor on_row(const at::Tensor& tensor) {
    return is_device_kind(GetParam().backend) ? tensor.to(stand_in(0)) : tensor;
  }
  /// What rank `from` sends to rank `to`.
  static at::Tensor contents(int from, int to, std::int64_t length, at::ScalarType dtype) {
    return random_inputs(1, {length}, dtype,
                         static_cast<std::uint64_t>(1 + from * 1009 + to * 31 + length))[0];
  }
  static at::Tensor empty_like_row(const at::Tensor& tensor) { return on_row(at::zeros_like(tensor)); }

  /// Ranks that leave the world early would break the group.
  void run(const std::function<void(collective::Group&)>& body) {
    CollectiveSuite::run([&](collective::Group& group) {
      body(group);
      group.barrier();
    });
  }

  using Body = std::function<void(collective::Group&)>;
  /// What each rank throws in each of `bodies`, which run in turn, each with a group of its own on every rank. A group ends
  /// after all ranks are done with its body.
  std::vector<std::vector<Error>> errors_of_each(const std::vector<Body>& bodies) {
    std::vector<std::vector<Error>> errors(
        bodies.size(), std::vector<Error>(static_cast<std::size_t>(ranks()), nothing_thrown()));
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           for (std::size_t i = 0; i < bodies.size(); ++i) {
             if (const auto error = error_in(self, options(), bodies[i]))
               errors[i][static_cast<std::size_t>(self.rank)] = *error;
           }
         })) {
      EXPECT_FALSE(failure) << describe(failure).text;
    }
    return errors;
  }
  /// The same for one body. Rank 0 has a limit of its own, which passes first.
  std::vector<Error> errors_of(const Body& body, Duration limit_of_rank_0 = std::chrono::seconds(60)) {
    std::vector<Error> errors(static_cast<std::size_t>(ranks()), nothing_thrown());
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           collective::GroupOptions options = this->options();
           options.timeout = self.rank == 0 ? limit_of_rank_0 : Duration(std::chrono::seconds(60));
           if (const auto error = error_in(self, options, body))
             errors[static_cast<std::size_t>(self.rank)] = *error;
         })) {
      EXPECT_FALSE(failure) << describe(failure).text;
    }
    return errors;
  }

  /// Runs errors_of() with a limit of rank 0 that passes when rank 0 calls pass_limit().
  std::vector<Error> errors_of_late(const Body& body) {
    world_.make_clocks();
    return errors_of(body, kLimit);
  }
  void pass_limit() { world_.clock(0).move_forward(kLimit + std::chrono::seconds(5)); }

  /// What `call` throws.
  static Error thrown_by(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    return nothing_thrown();
  }

 private:
  static constexpr Duration kLimit = std::chrono::seconds(20);

  static Error nothing_thrown() { return {ErrorKind::kInvalid, "nothing was thrown"}; }

  std::optional<Error> error_in(CollectiveWorld::Rank self, const collective::GroupOptions& options,
                                const Body& body) {
    const auto meet = [&](const char* name) {
      self.membership.barrier(name, {}, world_.executor().deadline_in(std::chrono::seconds(60)));
    };
    collective::Group group = make_group_of_row(self.runtime, self.membership, options);
    std::optional<Error> error;
    try {
      // All have made it. A barrier of the group would have the timeout that a test is about.
      meet("test.made");
      body(group);
    } catch (...) {
      error = to_error(std::current_exception());
    }
    meet("test.end");
    return error;
  }
};

}  // namespace torchspan::testing
