#include "pipeline/runtime/tied_gradients.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "pipeline/runtime/gradient_fields.h"
#include "pipeline/runtime/moved.h"

namespace torchspan::pipeline {
namespace {

/// A gradient, or nothing, on the device of a copy of its parameter.
at::Tensor moved_to(const at::Tensor& copy, at::Tensor gradient) {
  return gradient.defined() ? moved(std::move(gradient), copy.device()) : gradient;
}

}  // namespace

TiedGradients::TiedGradients(const LocalPipeline& local, StepId id)
    : local_(local), id_(id), exchanges_(local.ties.size()) {}

TiedGradients::~TiedGradients() {
  if (!begun_) return;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    const std::vector<at::Tensor>& before = exchanges_[tie].before;
    for (std::size_t copy = 0; copy < before.size(); ++copy) {
      if (before[copy].defined()) local_.ties[tie].copies[copy].mutable_grad() = before[copy];
    }
  }
}

void TiedGradients::begin() {
  begun_ = true;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    for (const at::Tensor& copy : local_.ties[tie].copies)
      exchanges_[tie].before.push_back(std::exchange(copy.mutable_grad(), at::Tensor()));
  }
}

void TiedGradients::send() {
  const torch::autograd::AutoGradMode no_grad(false);
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    const Tie& local_tie = local_.ties[tie];
    if (local_tie.copies.empty()) continue;
    at::Tensor mine;
    for (const at::Tensor& copy : local_tie.copies) {
      at::Tensor gradient = std::exchange(copy.mutable_grad(), at::Tensor());
      mine = sum_of_gradients(mine, moved_to(local_tie.copies.front(), std::move(gradient)));
    }
    const int first = local_tie.workers.front();
    if (first == local_.me) {
      add_part(tie, local_.me, std::move(mine));
    } else {
      post(first, tie, std::move(mine));
    }
  }
}

void TiedGradients::accept(TiedGradient& event) {
  const auto tie = static_cast<std::size_t>(event.tie);
  const bool known = event.tie >= 0 && tie < exchanges_.size() && !local_.ties[tie].copies.empty();
  const std::vector<int> none;
  const std::vector<int>& workers = known ? local_.ties[tie].workers : none;
  const bool sent_by_it = std::find(workers.begin(), workers.end(), event.worker) != workers.end() &&
                          event.worker != local_.me &&
                          (workers.front() == local_.me || workers.front() == event.worker);
  const bool fits = sent_by_it && (!event.gradient.defined() ||
                                   event.gradient.sizes() == local_.ties[tie].copies.front().sizes());
  if (!fits) {
    throw Error(ErrorKind::kInvalid,
                fmt::format("a gradient of tied parameter {} from worker {} does not belong to "
                            "this worker",
                            event.tie, event.worker));
  }
  at::Tensor gradient = moved_to(local_.ties[tie].copies.front(), std::move(event.gradient));
  if (workers.front() == local_.me) return add_part(tie, event.worker, std::move(gradient));
  exchanges_[tie].sum = std::move(gradient);
  exchanges_[tie].done = true;
}

void TiedGradients::add_part(std::size_t tie, int worker, at::Tensor gradient) {
  const torch::autograd::AutoGradMode no_grad(false);
  const Tie& local_tie = local_.ties[tie];
  Exchange& exchange = exchanges_[tie];
  exchange.parts[worker] = std::move(gradient);
  if (exchange.parts.size() < local_tie.workers.size()) return;
  for (const int one : local_tie.workers)
    exchange.sum = sum_of_gradients(exchange.sum, exchange.parts.at(one));
  exchange.parts.clear();
  exchange.done = true;
  for (const int other : local_tie.workers) {
    if (other != local_.me) post(other, tie, exchange.sum);
  }
}

void TiedGradients::post(int to, std::size_t tie, at::Tensor gradient) const {
  local_.post_to(to, TiedGradient{id_, static_cast<std::int32_t>(tie), local_.me, std::move(gradient),
                                  local_.grid.devices.of_worker(local_.rank_of(to))});
}

bool TiedGradients::complete() const {
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    if (!local_.ties[tie].copies.empty() && !exchanges_[tie].done) return false;
  }
  return true;
}

void TiedGradients::finish() {
  const torch::autograd::AutoGradMode no_grad(false);
  begun_ = false;
  for (std::size_t tie = 0; tie < exchanges_.size(); ++tie) {
    for (std::size_t copy = 0; copy < local_.ties[tie].copies.size(); ++copy) {
      const at::Tensor sum = moved_to(local_.ties[tie].copies[copy], exchanges_[tie].sum);
      at::Tensor before = std::move(exchanges_[tie].before[copy]);
      // An optimizer may change `.grad` in place.
      const bool becomes_field = sum.defined() && !before.defined();
      put_gradient(local_.ties[tie].copies[copy], std::move(before), becomes_field ? sum.clone() : sum);
    }
    exchanges_[tie] = Exchange();
  }
}

}  // namespace torchspan::pipeline
