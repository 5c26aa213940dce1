#!/usr/bin/env python3
"""Writes src/optim/functional/golden_optim.h: what PyTorch's optimizers and learning-rate schedulers make of fixed
gradients. Needs python3-torch (1.13 was used); run it from the repository root after a change of the cases.

Start values and gradients are quotients of small integers, so that the test computes the same ones:
see values() and gradient() here and in src/optim/functional/golden_test.cpp."""
import torch

STEPS = 200
SIZE = 6  # elements of the dense parameter; the sparse one has four rows of two


def values(count):
    return torch.tensor([((i * 37) % 101 - 50) / 64 for i in range(count)], dtype=torch.float64)


def gradient(step, count):
    return torch.tensor([((step * 7919 + i * 104729) % 257 - 128) / 64 for i in range(count)], dtype=torch.float64)


def rows(step):
    return [(step * 5) % 4, (step * step) % 4, (step * 3 + 1) % 4]


CASES = {
    "SGD": ["lr=0.01, maximize=True", "lr=0.01, momentum=0.9, dampening=0.2, weight_decay=0.1, maximize=True"],
    "Adam": ["maximize=True, weight_decay=0.1", "amsgrad=True, maximize=True"],
    "AdamW": ["maximize=True", "amsgrad=True, weight_decay=0.1, maximize=True"],
    "Adagrad": ["lr=0.1, lr_decay=0.01, initial_accumulator_value=0.5, maximize=True"],
    "Adadelta": ["", "lr=0.5, rho=0.8, eps=1e-3", "weight_decay=0.1", "maximize=True, weight_decay=0.2"],
    "RMSprop": ["maximize=True", "centered=True, momentum=0.9, weight_decay=0.1, maximize=True"],
    "Rprop": ["", "lr=0.1, etas=(0.4, 1.5), step_sizes=(1e-3, 0.5)", "maximize=True"],
    "Adamax": ["", "lr=0.1, betas=(0.8, 0.95), eps=1e-3", "weight_decay=0.1", "maximize=True, weight_decay=0.2"],
    "SparseAdam": ["", "lr=0.1, betas=(0.8, 0.95), eps=1e-3", "maximize=True"],
}


def train(kind, options):
    """The last values of a parameter; it has no gradient at every third step."""
    sparse = kind == "SparseAdam"
    parameter = (values(8).view(4, 2) if sparse else values(SIZE)).requires_grad_()
    optimizer = eval(f"torch.optim.{kind}([parameter], {options})")  # pylint: disable=eval-used
    for step in range(STEPS):
        if step % 3 == 2:
            parameter.grad = None
        elif sparse:
            parameter.grad = torch.sparse_coo_tensor([rows(step)], gradient(step, 6).view(3, 2), (4, 2))
        else:
            parameter.grad = gradient(step, SIZE)
        optimizer.step()
    return parameter.detach().flatten().tolist()


SCHEDULES = {
    "step": "StepLR(optimizer, 7, 0.3)",
    "cosine": "CosineAnnealingLR(optimizer, 40, eta_min=0.1)",
    "one_cycle": "OneCycleLR(optimizer, max_lr=1.0, total_steps=40, pct_start=0.3, cycle_momentum=False)",
}


def rates(schedule):
    from torch.optim import lr_scheduler
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = eval("lr_scheduler." + schedule, {"lr_scheduler": lr_scheduler, "optimizer": optimizer})
    found = []
    for _ in range(40):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def table(name, entries):
    yield f"inline const std::map<std::string, std::vector<double>> {name} = {{"
    for key, numbers in entries.items():
        yield f'    {{"{key}", {{{", ".join(map(repr, numbers))}}}}},'
    yield "};"


def main():
    optimizers = {f"{kind}({options})": train(kind, options) for kind, list_ in CASES.items() for options in list_}
    schedules = {name: rates(code) for name, code in SCHEDULES.items()}
    lines = ["#pragma once", "// Written by tools/golden_optim.py.", "#include <map>", "#include <string>",
             "#include <vector>", "", "namespace torchspan::optim::golden {", "", "// clang-format off",
             *table("kOptimizers", optimizers), *table("kSchedules", schedules), "// clang-format on", "",
             "}  // namespace torchspan::optim::golden", ""]
    with open("src/optim/functional/golden_optim.h", "w", encoding="utf-8") as out:
        out.write("\n".join(lines))


if __name__ == "__main__":
    main()
