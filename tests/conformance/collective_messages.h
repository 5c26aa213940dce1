#pragma once
#include <optional>

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

  /// What each rank throws; `body` runs with a group on every rank, which ends after all ranks are done.
  std::vector<Error> errors_of(const collective::GroupOptions& options,
                               const std::function<void(collective::Group&)>& body) {
    std::vector<Error> errors;
    for (const auto& failure : world_.try_each([&](CollectiveWorld::Rank self) {
           collective::Group group = make_group_of_row(self.runtime, self.membership, options);
           std::exception_ptr failure;
           try {
             // All have made it. A barrier of the group would have the timeout that a test is about.
             self.membership.barrier("test.made", {},
                                     world_.executor().deadline_in(std::chrono::seconds(60)));
             body(group);
           } catch (...) {
             failure = std::current_exception();
           }
           self.membership.barrier("test.end", {}, world_.executor().deadline_in(std::chrono::seconds(60)));
           if (failure) std::rethrow_exception(failure);
         })) {
      errors.push_back(failure ? to_error(failure) : Error(ErrorKind::kInvalid, "nothing was thrown"));
    }
    return errors;
  }

  /// What `call` throws.
  static Error thrown_by(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    return {ErrorKind::kInvalid, "nothing was thrown"};
  }
};

}  // namespace torchspan::testing
