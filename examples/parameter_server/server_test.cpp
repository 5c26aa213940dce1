// The server's steps, without other processes.
#include "parameter_server/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <vector>

#include <ATen/ATen.h>

#include <torchspan/core/error.h>
#include <torchspan/session.h>

namespace parameter_server::server_test {
namespace {

using Tensors = std::vector<at::Tensor>;

class Server : public ::testing::Test {
 protected:
  torchspan::Future<Version> send(ParameterServer& server, std::int64_t trainer, Tensors gradients,
                                  std::int64_t step = 0) {
    auto promise = session_.worker().make_promise<Version>();
    auto future = promise.future();
    server->update(trainer, step, std::move(gradients), std::move(promise));
    return future;
  }
  static Tensors constant(const Tensors& parameters, double value) {
    Tensors gradients;
    for (const at::Tensor& parameter : parameters) gradients.push_back(at::full_like(parameter, value));
    return gradients;
  }
  /// Whether `after` is `before` less `change` in every element.
  static void expect_less(const Tensors& before, const Tensors& after, double change) {
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(after[i].allclose(before[i] - change, 1e-12, 1e-12)) << i;
  }

  torchspan::Session session_{torchspan::WorkerOptions()};
  const ServerOptions three_{.trainers = 3, .wait_for = 3, .lr = 0.5, .momentum = 0, .is_double = true};
};

TEST_F(Server, StepsWithTheMeanOfAllGradientsAndAnswersAllAtOnce) {
  ParameterServer server(three_);
  const Tensors before = server->fetch().parameters;
  const auto second = send(server, 1, constant(before, 4)), first = send(server, 0, constant(before, 1));
  EXPECT_FALSE(first.done() || second.done());
  EXPECT_EQ(server->fetch().step, 0);
  const auto third = send(server, 2, constant(before, 1));
  for (const auto& answer : {first, second, third}) {
    EXPECT_EQ(answer.wait().step, 1);
    expect_less(before, answer.wait().parameters, 0.5 * 2);
  }
  EXPECT_EQ(server->statistics().gradients, 3);
  EXPECT_EQ(server->statistics().missed_steps, 0);
}

TEST_F(Server, DoesNotWaitForTrainersThatHaveLeft) {
  ParameterServer server(three_);
  const Tensors before = server->fetch().parameters;
  const auto first = send(server, 0, constant(before, 1)), second = send(server, 1, constant(before, 3));
  EXPECT_FALSE(first.done());
  server->leave();
  expect_less(before, first.wait().parameters, 0.5 * 2);
  EXPECT_TRUE(second.done());
  server->leave();
  const auto last = send(server, 0, constant(before, 1), 1);
  expect_less(before, last.wait().parameters, 0.5 * 2 + 0.5);
  server->leave();
}

TEST_F(Server, CountsTheStepsThatAGradientMissed) {
  ServerOptions options = three_;
  options.wait_for = 1;
  ParameterServer server(options);
  const Tensors before = server->fetch().parameters;
  for (std::int64_t trainer = 0; trainer < 3; ++trainer)
    EXPECT_EQ(send(server, trainer, constant(before, 1)).wait().step, trainer + 1);
  expect_less(before, server->fetch().parameters, 3 * 0.5);
  EXPECT_EQ(server->statistics().missed_steps, 0 + 1 + 2);
}

TEST_F(Server, RejectsWhatDoesNotFitAndGoesOn) {
  ParameterServer server(three_);
  const Tensors before = server->fetch().parameters;
  const Tensors right = constant(before, 1);
  const auto first = send(server, 0, right);
  EXPECT_THROW(send(server, 0, right).wait(), torchspan::Error) << "it already waits";
  EXPECT_THROW(send(server, 1, {right.begin(), right.end() - 1}).wait(), torchspan::Error);
  Tensors wrong = right;
  wrong[1] = at::zeros({7}, at::kDouble);
  EXPECT_THROW(send(server, 1, wrong).wait(), torchspan::Error);
  wrong[1] = right[1].to(at::kFloat);
  EXPECT_THROW(send(server, 1, wrong).wait(), torchspan::Error);
  wrong[1] = at::Tensor();
  EXPECT_THROW(send(server, 1, wrong).wait(), torchspan::Error);
  const auto second = send(server, 1, right), third = send(server, 2, right);
  expect_less(before, first.wait().parameters, 0.5);
  EXPECT_EQ(second.wait().step + third.wait().step, 2);
}

}  // namespace
}  // namespace parameter_server::server_test
